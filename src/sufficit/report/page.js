"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const { grid, methods, starts, images } = data;
  const VIEWS = ["kept", "hidden", "rest"];
  const ROWS_AT_FIRST = 6;
  const INFERNO = [[0, 0, 4], [31, 12, 72], [85, 15, 109], [136, 34, 106], [186, 54, 85], [227, 89, 51], [249, 140, 10], [249, 201, 50], [252, 255, 164]];
  const rows = [...document.querySelectorAll(".row")];
  const at = { image: -1, method: -1, step: starts[data.best] };
  let all = false;

  /* Light and dark. */
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const tellTheme = () => { $("theme").textContent = dark() ? "Light" : "Dark"; $("theme").setAttribute("aria-pressed", String(dark())); };
  const keep = (theme) => { try { localStorage.setItem("sufficit-theme", theme); } catch { /* a file may not be allowed to */ } };
  const kept = () => { try { return localStorage.getItem("sufficit-theme"); } catch { return null; } };
  const setTheme = () => { const wanted = kept(); document.documentElement.dataset.theme = wanted || (dark() ? "dark" : "light"); tellTheme(); };
  $("theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; keep(document.documentElement.dataset.theme); tellTheme(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!kept()) { delete document.documentElement.dataset.theme; setTheme(); } });
  setTheme();
  $("theme").hidden = $("orders").hidden = false;

  /* Pictures as pixels. */
  const loading = new Map();
  const picture = (address) => {
    if (!loading.has(address)) loading.set(address, new Promise((done, fail) => { const image = new Image(); image.onload = () => done(image); image.onerror = fail; image.src = address; }));
    return loading.get(address);
  };
  const pixels = (source, width, height) => {
    const canvas = document.createElement("canvas");
    canvas.width = width; canvas.height = height;
    const pen = canvas.getContext("2d", { willReadFrequently: true });
    if (typeof source === "string") { pen.fillStyle = source; pen.fillRect(0, 0, width, height); }
    else pen.drawImage(source, 0, 0, width, height);
    return pen.getImageData(0, 0, width, height).data;
  };
  const size = (i) => { const image = rows[i].querySelector("img"); return [Number(image.getAttribute("width")), Number(image.getAttribute("height"))]; };
  const known = new Map();
  const once = (key, make) => { if (!known.has(key)) known.set(key, make()); return known.get(key); };
  const imagePixels = (i) => once(`image ${i}`, async () => pixels(await picture(rows[i].querySelector("img").src), ...size(i)));
  const mapPixels = (i, m) => once(`map ${i} ${m}`, async () => pixels(await picture(images[i].maps[m]), ...size(i)));
  const fillPixels = (i) => once(`fill ${i}`, async () => {
    const fill = data.fill[data.fill.length > 1 ? i : 0];
    return pixels(fill.startsWith("#") ? fill : await picture(fill), ...size(i));
  });

  /* A heatmap over its image; steps of the map count the alphas that lie below it. */
  const colour = (value) => {
    const place = value * (INFERNO.length - 1), low = Math.min(Math.floor(place), INFERNO.length - 2);
    return INFERNO[low].map((channel, c) => channel + (place - low) * (INFERNO[low + 1][c] - channel));
  };
  const COLOURS = Array.from({ length: grid.length }, (_, step) => [step ? (grid[step] + grid[step - 1]) / 2 : 0]).map(([value]) => [value, colour(value)]);
  const drawOverlay = async (canvas, i, m) => {
    const [image, map] = await Promise.all([imagePixels(i), mapPixels(i, m)]);
    const drawn = new ImageData(...size(i));
    for (let p = 0; p < image.length; p += 4) {
      const [value, tint] = COLOURS[Math.min(map[p], grid.length - 1)];
      const grey = (image[p] + image[p + 1] + image[p + 2]) / 3, weight = 0.7 * value;
      for (let c = 0; c < 3; c++) drawn.data[p + c] = grey * (1 - weight) + tint[c] * weight;
      drawn.data[p + 3] = 255;
    }
    canvas.getContext("2d").putImageData(drawn, 0, 0);
  };
  const inside = {
    kept: (value, step) => value > step,
    hidden: (value, step, start) => value > start && value <= step,
    rest: (value, step) => value <= step,
  };
  const drawMasked = (canvas, view, image, map, fill, step, start) => {
    const drawn = new ImageData(canvas.width, canvas.height);
    for (let p = 0; p < image.length; p += 4) {
      const source = inside[view](map[p], step, start) ? image : fill;
      for (let c = 0; c < 3; c++) drawn.data[p + c] = source[p + c];
      drawn.data[p + 3] = 255;
    }
    canvas.getContext("2d").putImageData(drawn, 0, 0);
  };

  /* What the model says. */
  const percent = (value) => (value > 0 && value < 0.001 ? "< 0.1" : (100 * value).toFixed(1)) + "\u00a0%";
  const share = (view, curves, step, start) => ({
    kept: curves.share[step], hidden: Math.max(0, curves.share[start] - curves.share[step]), rest: 1 - curves.share[step],
  })[view];
  const says = (view, image, curves, step, start) => {
    const value = curves[view][step], hit = curves[`${view}_hits`][step];
    if (hit === "?") return { text: view === "hidden" && step < start ? "nothing: α is below α_min" : "not asked", yes: false };
    return hit === "1" ? { text: `says ${image.target} (${percent(value)})`, yes: true } : { text: `says another class (${image.target}: ${percent(value)})`, yes: false };
  };

  /* The curves of one image. The plot is as wide as the way of the slider's thumb. */
  const EDGE = 8, TOP = 8, BARS = 30;
  const drawCurves = (curves, start) => {
    const svg = $("curves"), width = svg.clientWidth, height = svg.clientHeight;
    if (!width) return;
    const x = (step) => EDGE + grid[step] * (width - 2 * EDGE), y = (value) => TOP + (1 - value) * (height - TOP - BARS - 4);
    const parts = [0, 0.5, 1].map((v) => `<line class="grid" x1="${EDGE}" x2="${width - EDGE}" y1="${y(v)}" y2="${y(v)}"/><text class="tick" x="${EDGE}" y="${y(v) - 3}">${v ? v : ""}</text>`);
    parts.push(`<line class="mark" x1="${x(start)}" x2="${x(start)}" y1="${TOP}" y2="${height}"/>`);
    VIEWS.forEach((view, v) => {
      let pen = "M", path = "";
      curves[view].forEach((value, step) => { if (value === null) return; path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`; pen = "L"; });
      parts.push(`<path class="line ${view}" d="${path}"/>`);
      const row = height - BARS + 4 + v * 9;
      for (const run of curves[`${view}_hits`].matchAll(/1+/g)) {
        const first = x(run.index), last = x(run.index + run[0].length - 1);
        parts.push(`<rect class="${view}" fill="var(--c)" opacity=".8" rx="2" x="${(first - 2).toFixed(1)}" width="${(last - first + 4).toFixed(1)}" y="${row}" height="5"/>`);
      }
    });
    parts.push(`<g id="marker"><line stroke="var(--ink)" y1="0" y2="${height}"/>${VIEWS.map((view) => `<circle class="${view}" r="4.5" fill="var(--c)" stroke="var(--card)" stroke-width="1.5"/>`).join("")}</g>`);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.innerHTML = parts.join("");
    svg.dataset.x = JSON.stringify([EDGE, width - 2 * EDGE]);
    VIEWS.forEach((view) => { svg.querySelector(`circle.${view}`).dataset.y = JSON.stringify(curves[view].map((v) => (v === null ? null : y(v)))); });
  };
  const moveMarker = (step) => {
    const svg = $("curves"), marker = $("marker");
    if (!marker) return;
    const [left, width] = JSON.parse(svg.dataset.x), x = (left + grid[step] * width).toFixed(1);
    marker.querySelector("line").setAttribute("x1", x); marker.querySelector("line").setAttribute("x2", x);
    marker.querySelectorAll("circle").forEach((circle) => {
      const y = JSON.parse(circle.dataset.y)[step];
      circle.setAttribute("cx", x); circle.setAttribute("cy", y ?? 0); circle.style.display = y === null ? "none" : "";
    });
  };

  const show = async () => {
    const { image: i, method: m, step } = at, image = images[i], curves = image.curves[m], start = starts[m];
    $("alpha").value = step;
    $("alpha-value").textContent = `α = ${grid[step].toFixed(2)}`;
    const words = VIEWS.map((view) => says(view, image, curves, step, start));
    $("alpha").setAttribute("aria-valuetext", `alpha ${grid[step].toFixed(2)}: kept ${words[0].text}; complement ${words[2].text}`);
    VIEWS.forEach((view, v) => {
      const figure = document.querySelector(`[data-view="${view}"]`), said = figure.querySelector(".says");
      figure.querySelector(".share").textContent = `${percent(share(view, curves, step, start))} of the pixels`;
      said.textContent = words[v].text; said.classList.toggle("no", !words[v].yes);
    });
    moveMarker(step);
    const sources = await Promise.all([imagePixels(i), mapPixels(i, m), fillPixels(i)]);
    if (at.image !== i || at.method !== m || at.step !== step) return;
    VIEWS.forEach((view) => drawMasked(document.querySelector(`[data-view="${view}"] canvas`), view, ...sources, step, start));
    $("viewer").dataset.drawn = `${i} ${m} ${step}`;
  };
  const choose = (i, m) => {
    if (at.method !== m) at.step = starts[m];
    at.image = i; at.method = m;
    document.querySelectorAll("button.thumb").forEach((thumb) => thumb.setAttribute("aria-pressed", "false"));
    rows[i].querySelector(`button[data-method="${m}"]`).setAttribute("aria-pressed", "true");
    rows[i].append($("viewer"));
    $("viewer").hidden = false;
    $("viewer-title").textContent = `${images[i].name}, seen through ${methods[m]}`;
    $("to-start").textContent = `α_min = ${grid[starts[m]].toFixed(2)}`;
    drawCurves(images[i].curves[m], starts[m]);
    return show();
  };

  /* Orders of the images. */
  const present = (image) => image.msi.filter((value) => value !== null);
  const judged = (image) => { const judge = Number($("judge").value), own = judge < 0 ? present(image) : image.msi[judge] === null ? [] : [image.msi[judge]]; return own.length ? own.reduce((a, b) => a + b, 0) / own.length : -Infinity; };
  const spread = (image) => { const own = present(image); return own.length ? Math.max(...own) - Math.min(...own) : -Infinity; };
  const KEYS = { given: (i) => -i, best: (i) => judged(images[i]), worst: (i) => -judged(images[i]), disputed: (i) => spread(images[i]) };
  const SAID = { given: "", best: "highest MSI first", worst: "lowest MSI first", disputed: "largest spread of MSI between methods first" };
  const reveal = () => {
    const listed = [...document.querySelectorAll("#rows > li")];
    listed.forEach((row, place) => { row.hidden = !all && place >= ROWS_AT_FIRST; if (!row.hidden) drawRow(Number(row.dataset.image)); });
    $("more").hidden = all || listed.length <= ROWS_AT_FIRST;
    $("more").textContent = `Show all ${listed.length} images`;
    return listed;
  };
  const drawRow = (i) => once(`row ${i}`, () => Promise.all(methods.map((_, m) => drawOverlay(rows[i].querySelector(`button[data-method="${m}"] canvas`), i, m))));
  const order = (name) => {
    const key = KEYS[name], sorted = images.map((_, i) => i).sort((a, b) => key(b) - key(a) || a - b);
    sorted.forEach((i) => $("rows").append(rows[i]));
    document.querySelectorAll("[data-order]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.order === name)));
    $("said").textContent = SAID[name];
    reveal();
    return choose(sorted[0], at.method < 0 ? data.best : at.method);
  };
  const ordered = () => document.querySelector('[data-order][aria-pressed="true"]').dataset.order;

  rows.forEach((row, i) => {
    const top = Math.max(...present(images[i]));
    row.querySelectorAll("button.thumb").forEach((thumb) => {
      const m = Number(thumb.dataset.method);
      thumb.classList.toggle("top-one", images[i].msi[m] === top);
      thumb.addEventListener("click", () => choose(i, m));
    });
  });
  document.querySelectorAll("[data-order]").forEach((button) => button.addEventListener("click", () => order(button.dataset.order)));
  $("judge").addEventListener("change", () => order(["given", "disputed"].includes(ordered()) ? "best" : ordered()));
  $("more").addEventListener("click", () => { all = true; const listed = reveal(); listed[ROWS_AT_FIRST].querySelector("button").focus(); });
  $("alpha").max = grid.length - 1;
  $("alpha").addEventListener("input", () => { at.step = Number($("alpha").value); show(); });
  $("to-start").addEventListener("click", () => { at.step = starts[at.method]; show(); });
  new ResizeObserver(() => { if (at.image >= 0) { drawCurves(images[at.image].curves[at.method], starts[at.method]); moveMarker(at.step); } }).observe($("curves"));
  order("given").then(() => { document.documentElement.dataset.ready = "yes"; });
})();
