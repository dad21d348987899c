/* The report: rows of images, an overlay a method, and the viewer below the one chosen. */
const data = JSON.parse($("data").textContent);
const { grid, methods, starts, images } = data;
const ROWS_AT_FIRST = 6;
const rows = [...document.querySelectorAll(".row")];
const at = { image: -1, method: -1 };
let all = false;
$("orders").hidden = false;

const size = (i) => { const image = rows[i].querySelector("img"); return [Number(image.getAttribute("width")), Number(image.getAttribute("height"))]; };
const sceneOf = (i, m) => {
  const [width, height] = size(i), image = images[i], curves = image.curves[m];
  return {
    key: `${i} ${m}`, title: `${image.name}, seen through ${methods[m]}`, target: image.target, width, height,
    image: rows[i].querySelector("img").src, map: image.maps[m], fill: data.fill[data.fill.length > 1 ? i : 0],
    grid, start: starts[m], shares: curves.share, curves, classes: data.classes, region: image.regions[m] ?? null,
  };
};
const choose = (i, m) => {
  const step = at.method !== m ? starts[m] : now.step;
  at.image = i; at.method = m;
  document.querySelectorAll("button.thumb").forEach((thumb) => thumb.setAttribute("aria-pressed", "false"));
  rows[i].querySelector(`button[data-method="${m}"]`).setAttribute("aria-pressed", "true");
  rows[i].append($("viewer"));
  return present(sceneOf(i, m), step);
};

/* Orders of the images: by the ranked methods, or by one that is chosen. */
const values = (i, chosen = data.ranked) => chosen.filter((m) => images[i].msi[m] !== null).map((m) => images[i].msi[m]);
const judged = (i, sign) => { const judge = Number($("judge").value), own = judge < 0 ? values(i) : values(i, [judge]); return own.length ? sign * own.reduce((a, b) => a + b, 0) / own.length : -Infinity; };
const spread = (i) => { const own = values(i); return own.length ? Math.max(...own) - Math.min(...own) : -Infinity; };
const KEYS = { given: (i) => -i, best: (i) => judged(i, 1), worst: (i) => judged(i, -1), disputed: spread };
const SAID = { given: "", best: "highest MSI first", worst: "lowest MSI first", disputed: "largest spread of MSI between methods first" };
const reveal = () => {
  const listed = [...document.querySelectorAll("#rows > li")];
  listed.forEach((row, place) => { row.hidden = !all && place >= ROWS_AT_FIRST; if (!row.hidden) drawRow(Number(row.dataset.image)); });
  $("more").hidden = all || listed.length <= ROWS_AT_FIRST;
  $("more").textContent = `Show all ${listed.length} images`;
  return listed;
};
const drawRow = (i) => once(`row ${i}`, () => Promise.all(methods.map((_, m) => drawOverlay(rows[i].querySelector(`button[data-method="${m}"] canvas`), sceneOf(i, m)))));
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
  const thumbs = [...row.querySelectorAll("button.thumb")];
  const top = Math.max(...thumbs.map((thumb) => images[i].msi[thumb.dataset.method] ?? -Infinity));
  thumbs.forEach((thumb) => {
    const m = Number(thumb.dataset.method);
    thumb.classList.toggle("top-one", images[i].msi[m] === top);
    thumb.addEventListener("click", () => choose(i, m));
  });
});
document.querySelectorAll("[data-order]").forEach((button) => button.addEventListener("click", () => order(button.dataset.order)));
$("judge").addEventListener("change", () => order(["given", "disputed"].includes(ordered()) ? "best" : ordered()));
$("more").addEventListener("click", () => { all = true; const listed = reveal(); listed[ROWS_AT_FIRST].querySelector("button").focus(); });
order("given").then(() => { document.documentElement.dataset.ready = "yes"; });
