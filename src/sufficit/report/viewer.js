/* The viewer: one image seen through one heatmap, cut at a threshold or at a size. Whoever shows it
   makes scenes: { key, title, target, width, height, image, map, fill, grid, start, curves or null,
   waiting }, and values, 255 M, where the steps of the grid are so wide that colours would show them.
   Where the map was fitted, region has its order, size and certificate. On a live page, fit and ask
   make the server fit the map, and ask the model about a size. */
const $ = (id) => document.getElementById(id);
const VIEWS = ["kept", "hidden", "rest"];
const INFERNO = [[0, 0, 4], [31, 12, 72], [85, 15, 109], [136, 34, 106], [186, 54, 85], [227, 89, 51], [249, 140, 10], [249, 201, 50], [252, 255, 164]];

/* Light and dark. */
const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const tellTheme = () => { $("theme").textContent = dark() ? "Light" : "Dark"; $("theme").setAttribute("aria-pressed", String(dark())); };
const keep = (theme) => { try { localStorage.setItem("sufficit-theme", theme); } catch { /* a file may not be allowed to */ } };
const kept = () => { try { return localStorage.getItem("sufficit-theme"); } catch { return null; } };
const setTheme = () => { const wanted = kept(); document.documentElement.dataset.theme = wanted || (dark() ? "dark" : "light"); tellTheme(); };
$("theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; keep(document.documentElement.dataset.theme); tellTheme(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!kept()) { delete document.documentElement.dataset.theme; setTheme(); } });
setTheme();
$("theme").hidden = false;

/* Pictures as pixels. */
const picture = (address) => new Promise((done, fail) => { const image = new Image(); image.onload = () => done(image); image.onerror = fail; image.src = address; });
const pixels = (source, width, height) => {
  const canvas = document.createElement("canvas");
  canvas.width = width; canvas.height = height;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  if (typeof source === "string") { pen.fillStyle = source; pen.fillRect(0, 0, width, height); }
  else pen.drawImage(source, 0, 0, width, height);
  return pen.getImageData(0, 0, width, height).data;
};
const known = new Map();
const once = (key, make) => { if (!known.has(key)) known.set(key, make()); return known.get(key); };
const pixelsOf = (address, { width, height }) => once(`${width} ${height} ${address}`, async () => pixels(address.startsWith("#") ? address : await picture(address), width, height));

/* A heatmap over its image; steps of the map count the alphas that lie below it. */
const colour = (value) => {
  const place = value * (INFERNO.length - 1), low = Math.min(Math.floor(place), INFERNO.length - 2);
  return INFERNO[low].map((channel, c) => channel + (place - low) * (INFERNO[low + 1][c] - channel));
};
const FINE = Array.from({ length: 256 }, (_, i) => [i / 255, colour(i / 255)]);
const coloursOf = (grid) => grid.map((alpha, step) => (step ? (alpha + grid[step - 1]) / 2 : 0)).map((value) => [value, colour(value)]);
const drawOverlay = async (canvas, scene) => {
  const colours = scene.values ? FINE : coloursOf(scene.grid);
  const [image, map] = await Promise.all([pixelsOf(scene.image, scene), pixelsOf(scene.values || scene.map, scene)]);
  const drawn = new ImageData(scene.width, scene.height);
  for (let p = 0; p < image.length; p += 4) {
    const [value, tint] = colours[Math.min(map[p], colours.length - 1)];
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
const share = (view, { shares, start }, step) => ({
  kept: shares[step], hidden: Math.max(0, shares[start] - shares[step]), rest: 1 - shares[step],
})[view];
const says = (view, { target, curves, classes, start, waiting }, step) => {
  if (view === "hidden" && step < start) return { text: "nothing: α is below α_min", yes: false };
  if (!curves) return { text: waiting || "not asked", yes: false };
  const value = curves[view][step], hit = curves[`${view}_hits`][step];
  if (hit === "?") return { text: "not asked", yes: false };
  if (hit === "1") return { text: `says ${target} (${percent(value)})`, yes: true };
  const said = classes[curves[`${view}_said`][step]] ?? "another class";
  return { text: `says ${said} (${target}: ${percent(value)})`, yes: false };
};

/* The curves of one image. The plot is as wide as the way of the slider's thumb. */
const EDGE = 8, TOP = 8, BARS = 30;
const drawCurves = ({ grid, curves, start }) => {
  const svg = $("curves"), width = svg.clientWidth, height = svg.clientHeight;
  if (!width) return;
  const x = (step) => EDGE + grid[step] * (width - 2 * EDGE), y = (value) => TOP + (1 - value) * (height - TOP - BARS - 4);
  const parts = [0, 0.5, 1].map((v) => `<line class="grid" x1="${EDGE}" x2="${width - EDGE}" y1="${y(v)}" y2="${y(v)}"/><text class="tick" x="${EDGE}" y="${y(v) - 3}">${v ? v : ""}</text>`);
  parts.push(`<line class="mark" x1="${x(start)}" x2="${x(start)}" y1="${TOP}" y2="${height}"/>`);
  const shown = curves ? VIEWS : [];
  shown.forEach((view, v) => {
    let pen = "M", path = "";
    curves[view].forEach((value, step) => { if (value === null) return; path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`; pen = "L"; });
    parts.push(`<path class="line ${view}" d="${path}"/>`);
    const row = height - BARS + 4 + v * 9;
    for (const run of curves[`${view}_hits`].matchAll(/1+/g)) {
      const first = x(run.index), last = x(run.index + run[0].length - 1);
      parts.push(`<rect class="${view}" fill="var(--c)" opacity=".8" rx="2" x="${(first - 2).toFixed(1)}" width="${(last - first + 4).toFixed(1)}" y="${row}" height="5"/>`);
    }
  });
  parts.push(`<g id="marker"><line stroke="var(--ink)" y1="0" y2="${height}"/>${shown.map((view) => `<circle class="${view}" r="4.5" fill="var(--c)" stroke="var(--card)" stroke-width="1.5"/>`).join("")}</g>`);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.innerHTML = parts.join("");
  svg.dataset.x = JSON.stringify([EDGE, width - 2 * EDGE]);
  shown.forEach((view) => { svg.querySelector(`circle.${view}`).dataset.y = JSON.stringify(curves[view].map((v) => (v === null ? null : y(v)))); });
};
const moveMarker = ({ grid }, step) => {
  const svg = $("curves"), marker = $("marker");
  if (!marker) return;
  const [left, width] = JSON.parse(svg.dataset.x), x = (left + grid[step] * width).toFixed(1);
  marker.querySelector("line").setAttribute("x1", x); marker.querySelector("line").setAttribute("x2", x);
  marker.querySelectorAll("circle").forEach((circle) => {
    const y = JSON.parse(circle.dataset.y)[step];
    circle.setAttribute("cx", x); circle.setAttribute("cy", y ?? 0); circle.style.display = y === null ? "none" : "";
  });
};

/* Regions: the first pixels of the map's order. Sizes are in thousandths of the image. */
const GREY = 128, OUTLINE_SIDE = 448, OUTLINE = [["rgb(0 0 0 / 60%)", 6], ["#35e0cf", 3]];
const placesOf = async (scene) => {
  const address = scene.region?.order || scene.values || scene.map, drawn = await pixelsOf(address, scene);
  return once(`places ${scene.width} ${scene.height} ${address}`, () => {
    const keys = new Uint8Array(drawn.length / 4).map((_, p) => drawn[4 * p]);
    const order = new Uint32Array(keys.length).map((_, p) => p).sort((a, b) => keys[b] - keys[a] || a - b); /* ties in pixel order */
    const places = new Uint32Array(keys.length);
    order.forEach((pixel, place) => { places[pixel] = place; });
    return places;
  });
};
const regionOf = async (scene, size) => {
  const places = await placesOf(scene), count = Math.floor((size * places.length) / 1000 + 0.5);
  return places.map((place) => (place < count ? 1 : 0));
};
const fitTo = (canvas, width, height) => { if (canvas.width !== width) canvas.width = width; if (canvas.height !== height) canvas.height = height; return canvas.getContext("2d"); };
const drawAlone = (canvas, { width, height }, image, region) => {
  const drawn = new ImageData(width, height);
  for (let p = 0; p < image.length; p++) drawn.data[p] = region[p >> 2] || p % 4 === 3 ? image[p] : GREY;
  fitTo(canvas, width, height).putImageData(drawn, 0, 0);
};
const drawOutline = async (canvas, { image, width, height }, region) => {
  const k = Math.max(1, Math.round(OUTLINE_SIDE / Math.max(width, height))), pen = fitTo(canvas, k * width, k * height), photo = await once(`picture ${image}`, () => picture(image));
  pen.drawImage(photo, 0, 0, k * width, k * height);
  pen.beginPath();
  for (let y = 0, p = 0; y < height; y++) {
    for (let x = 0; x < width; x++, p++) {
      if (x && region[p] !== region[p - 1]) { pen.moveTo(k * x, k * y); pen.lineTo(k * x, k * (y + 1)); }
      if (y && region[p] !== region[p - width]) { pen.moveTo(k * x, k * y); pen.lineTo(k * (x + 1), k * y); }
    }
  }
  pen.lineCap = "round";
  OUTLINE.forEach(([colour, wide]) => { pen.strokeStyle = colour; pen.lineWidth = (wide * k * Math.max(width, height)) / OUTLINE_SIDE; pen.stroke(); });
};

/* What the model says of regions, where it was asked. */
const FILL_COLOURS = ["m1", "m2", "m0", "m3"];
const colourOf = (region, fill) => FILL_COLOURS[region.fills.indexOf(fill) % FILL_COLOURS.length];
const sizeText = (size) => `${size / 10}\u00a0%`;
const asked = ({ region }, size) => region?.sizes.find(([share]) => share === size);
const hit = (answer) => !Array.isArray(answer); /* else it is another class, and the confidence */
const confidence = (answer) => (hit(answer) ? answer : answer[1]);
const said = (answer, target) => (hit(answer) ? `${target} (${percent(answer)})` : `${answer[0]} (${target}: ${percent(answer[1])})`);
const cell = (kind, text, key = "") => {
  const found = document.createElement(kind);
  if (key) { const swatch = document.createElement("i"); swatch.className = `swatch ${key}`; found.append(swatch); }
  found.append(text);
  return found;
};
const row = (...cells) => { const found = document.createElement("tr"); found.append(...cells); return found; };
const tell = (scene, size) => {
  const { region, target } = scene, found = asked(scene, size);
  const known = (found ? region.fills : []).map((fill, k) => [fill, found[1][k] ?? null, found[2][k] ?? null]).filter(([, alone, rest]) => alone !== null || rest !== null);
  const words = known.map(([fill, ...parts]) => [fill, ...parts.map((part) => (part === null ? "not asked" : said(part, target)))]);
  $("told").replaceChildren(...(known.length ? [row(cell("th", "Fill"), cell("th", "Region alone"), cell("th", "The rest"))] : []), ...words.map(([fill, alone, rest]) => row(cell("th", fill, colourOf(region, fill)), cell("td", alone), cell("td", rest))));
  const none = region ? "The model was not asked about this size." : scene.fit ? "" : "The model was not asked about regions of this map. Scored as NAME+fit, it is.";
  $("untold").textContent = known.length ? "Lines: probability of the class. Dots: sizes that the model was asked, full where the class comes first." : none;
  $("ask-size").hidden = !scene.ask || Boolean(found);
  $("size").setAttribute("aria-valuetext", `${sizeText(size)} of the image. ${words.map(([fill, alone, rest]) => `${fill}: ${alone}, the rest ${rest}`).join("; ") || none}`);
};
const drawSizes = ({ region }) => {
  const svg = $("sizes"), width = svg.clientWidth, height = svg.clientHeight;
  if (!width) return;
  const x = (size) => EDGE + ((size - 5) / 995) * (width - 2 * EDGE), y = (value) => TOP + (1 - value) * (height - TOP - 14);
  const parts = [0, 0.5, 1].map((v) => `<line class="grid" x1="${EDGE}" x2="${width - EDGE}" y1="${y(v)}" y2="${y(v)}"/><text class="tick" x="${EDGE}" y="${y(v) - 3}">${v ? v : ""}</text>`);
  if (region) parts.push(`<line class="mark fitted" x1="${x(region.share)}" x2="${x(region.share)}" y1="${TOP}" y2="${height}"/><text class="tick" text-anchor="${region.share > 800 ? "end" : "start"}" x="${x(region.share) + (region.share > 800 ? -4 : 4)}" y="${height - 2}">fitted</text>`);
  (region?.fills ?? []).forEach((fill, k) => {
    const known = region.sizes.filter(([, alone]) => confidence(alone[k] ?? null) !== null).map(([share, alone]) => [x(share).toFixed(1), y(confidence(alone[k])).toFixed(1), hit(alone[k])]);
    parts.push(`<path class="line ${colourOf(region, fill)}" opacity=".45" d="M${known.map(([left, top]) => `${left} ${top}`).join("L")}"/>`);
    known.forEach(([left, top, full]) => parts.push(`<circle class="${colourOf(region, fill)}" r="3.5" cx="${left}" cy="${top}" stroke="var(--c)" stroke-width="1.5" fill="var(--${full ? "c" : "card"})"/>`));
  });
  parts.push(`<line id="size-marker" stroke="var(--ink)" y1="0" y2="${height}"/>`);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.innerHTML = parts.join("");
  svg.dataset.width = width;
};
const drawRegion = async () => {
  const { scene, size } = now, { region } = scene;
  delete $("viewer").dataset.drawn;
  $("size").value = size;
  $("size-value").textContent = `size = ${sizeText(size)}`;
  $("to-fitted").hidden = !region;
  $("to-fitted").textContent = region ? `fitted = ${sizeText(region.share)}` : "";
  $("certificate").textContent = region ? region.sentence.replaceAll(/(\d)%/g, "$1\u00a0%") : scene.fit ? "Finding the region that is enough…" : "";
  tell(scene, size);
  const marker = $("size-marker"), left = EDGE + ((size - 5) / 995) * (Number($("sizes").dataset.width) - 2 * EDGE);
  if (marker) { marker.setAttribute("x1", left); marker.setAttribute("x2", left); }
  const [image, inside] = await Promise.all([pixelsOf(scene.image, scene), regionOf(scene, size)]);
  if (now.scene !== scene || now.size !== size) return;
  drawAlone(document.querySelector('[data-view="alone"] canvas'), scene, image, inside);
  await drawOutline(document.querySelector('[data-view="outline"] canvas'), scene, inside);
  document.querySelector("#says-outline .share").textContent = `${sizeText(size)} of the pixels`;
  if (now.scene === scene && now.size === size) $("viewer").dataset.drawn = `${scene.key} ${size}`;
};

/* What is shown now: the threshold, or the size. */
const now = { scene: null, step: 0, size: 250, byUser: null, linked: null }; /* a size that a link asks for */
const bySize = () => $("viewer").dataset.view === "region";
const draw = async () => {
  if (bySize()) { await drawRegion(); return; }
  const { scene, step } = now, { grid } = scene;
  delete $("viewer").dataset.drawn;
  $("alpha").value = step;
  $("alpha-value").textContent = `α = ${grid[step].toFixed(2)}`;
  const words = VIEWS.map((view) => says(view, scene, step));
  $("alpha").setAttribute("aria-valuetext", `alpha ${grid[step].toFixed(2)}: kept ${words[0].text}; hidden ${words[1].text}; complement ${words[2].text}`);
  VIEWS.forEach((view, v) => {
    const figure = document.querySelector(`[data-view="${view}"]`), said = figure.querySelector(".says");
    figure.querySelector(".share").textContent = `${percent(share(view, scene, step))} of the pixels`;
    said.textContent = words[v].text; said.classList.toggle("no", !words[v].yes);
  });
  moveMarker(scene, step);
  const sources = await Promise.all([scene.image, scene.map, scene.fill].map((address) => pixelsOf(address, scene)));
  if (now.scene !== scene || now.step !== step) return;
  VIEWS.forEach((view) => {
    const canvas = document.querySelector(`[data-view="${view}"] canvas`);
    if (canvas.width !== scene.width) canvas.width = scene.width;
    if (canvas.height !== scene.height) canvas.height = scene.height;
    drawMasked(canvas, view, ...sources, step, scene.start);
  });
  $("viewer").dataset.drawn = `${scene.key} ${step}`;
};
const present = (scene, step) => {
  const old = now.scene, isNew = scene.region && (old?.key !== scene.key || !old.region);
  now.scene = scene; now.step = step;
  if (isNew) { now.size = now.linked ?? scene.region.share; now.linked = null; }
  const view = now.byUser ?? (scene.region ? "region" : "threshold");
  $("viewer").hidden = false; $("viewer").dataset.view = view;
  $("by-size").setAttribute("aria-pressed", String(view === "region")); $("by-threshold").setAttribute("aria-pressed", String(view !== "region"));
  if (view === "region" && !scene.region) scene.fit?.();
  $("viewer-title").textContent = scene.title;
  $("to-start").textContent = `α_min = ${scene.grid[scene.start].toFixed(2)}`;
  $("alpha").max = scene.grid.length - 1;
  drawCurves(scene); drawSizes(scene);
  return draw();
};
const show = (view) => { now.byUser = view; present(now.scene, now.step); };
$("by-threshold").addEventListener("click", () => show("threshold"));
$("by-size").addEventListener("click", () => show("region"));
$("size").addEventListener("input", () => { now.size = Number($("size").value); draw(); });
$("to-fitted").addEventListener("click", () => { now.size = now.scene.region.share; draw(); });
$("ask-size").addEventListener("click", () => now.scene.ask(now.size));
$("alpha").addEventListener("input", () => { now.step = Number($("alpha").value); draw(); });
$("to-start").addEventListener("click", () => { now.step = now.scene.start; draw(); });
const resized = new ResizeObserver(() => {
  if (!now.scene) return;
  if (bySize()) { drawSizes(now.scene); draw(); } else { drawCurves(now.scene); moveMarker(now.scene, now.step); }
});
resized.observe($("curves")); resized.observe($("sizes"));
