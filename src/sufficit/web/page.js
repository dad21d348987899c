/* The page: send an image to the server, show the heatmaps, then the scores method by method. */
const data = JSON.parse($("data").textContent);
const PAUSE = 350;
let file = null, name = "", example = null, run = null, explained = null, chosen = null, pause = 0;
let picked = false, wanted = null; /* by the user: a method, and what a link asks for */
const scored = new Map(), regions = new Map(); /* what is known of the image, by method and settings */
const AGNOSTIC = "class-agnostic: the same map for every class";

const signed = (value) => (value === null ? "–" : (value >= 0 ? "+" : "−") + Math.abs(value).toFixed(2));
const plain = (value) => (value === null ? "–" : value.toFixed(2).replace("-", "−"));
const make = (tag, more = {}, ...inside) => { const found = Object.assign(document.createElement(tag), more); found.append(...inside); return found; };
const inform = (text) => { $("status").textContent = text; };
const complain = (text) => {
  $("problem").textContent = text.charAt(0).toUpperCase() + text.slice(1); $("problem").hidden = !text;
  if (!text) return;
  inform("");
  if (explained) { $("found").dataset.state = "failed"; $("stale").textContent = `This is still the result of ${explained.name}.`; }
  $("problem").scrollIntoView({ block: "nearest" });
};

/* One request. */
const ask = async (address, fields, signal) => {
  const form = new FormData();
  fields.forEach(([key, value]) => form.append(key, value));
  form.append("file", file, "image");
  const answer = await fetch(address, { method: "POST", body: form, signal }).catch((error) => { throw signal.aborted ? error : new Error("The server does not answer: check that it still runs."); });
  const said = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(said.error);
  return said;
};
const settings = () => {
  const wanted = $("target").value.trim(), number = data.targets[wanted];
  return [["target", number === undefined ? wanted : String(number)], ...["alpha_min", "fill", "value_step"].map((id) => [id, $(id).value])];
};
const methods = () => [...document.querySelectorAll('[name="methods"]:checked')].map((box) => box.value);

/* One run: the heatmaps, then the scores of each method. */
const start = async () => {
  run?.abort();
  complain("");
  if (!file) return;
  if (!$("settings").checkValidity()) { $("settings").reportValidity(); return; }
  if (!methods().length) { complain("Choose at least one method."); return; }
  const mine = (run = new AbortController()), fields = settings();
  $("found").dataset.state = "explaining";
  inform("Computing the heatmaps…");
  try {
    const found = await ask("/api/explain", [...fields, ...methods().map((method) => ["methods", method])], mine.signal);
    known.clear();
    explained = { ...found, fields, name, example };
    showExplained();
    await scoreAll(mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) { $("certificate").textContent = ""; complain(error.message); }
  }
};
const keyOf = (method) => JSON.stringify([method, $("score").value, explained.fields]);
const scoresOf = (method) => scored.get(keyOf(method));
const scoreAll = async (signal) => {
  const all = explained.maps.map((map) => map.method), started = performance.now();
  $("found").dataset.state = "scoring";
  for (let left = all; (left = all.filter((method) => !scoresOf(method))).length;) {
    const method = left.includes(chosen) ? chosen : left[0];
    inform(`Scoring ${method} (${all.length - left.length + 1} of ${all.length}), curve step ${explained.value_step}…`);
    const key = keyOf(method);
    scored.set(key, await ask("/api/score", [...explained.fields, ["method", method], ["score", $("score").value]], signal));
    showScores(method);
  }
  if (!picked) choose(best(), now.step);
  $("found").dataset.state = "done";
  inform(`Done: ${all.length} ${all.length > 1 ? "methods" : "method"} scored in ${((performance.now() - started) / 1000).toFixed(1)} seconds, curve step ${explained.value_step}.`);
};

const worth = (map) => scoresOf(map.method)?.msi ?? -Infinity;
const best = () => explained.maps.reduce((top, map) => (worth(map) > worth(top) ? map : top)).method;

/* Show the answers. */
const showExplained = () => {
  const { target, prediction } = explained, first = prediction[0];
  $("found").hidden = false;
  $("found-title").textContent = `Prediction: ${first.name}${first.probability === null ? "" : ` (${percent(first.probability)})`}`;
  const others = prediction.some((one) => one.number === target.number) ? [] : [target];
  $("likeliest").replaceChildren(...[...prediction, ...others].map((one) => {
    const bar = make("i");
    bar.style.width = `${100 * (one.probability ?? 0)}%`;
    return make("li", { className: one.number === target.number ? "wanted" : "" }, make("span", { className: "name", textContent: one.name + (one.number === target.number ? ", explained" : "") }), make("span", { className: "bar", ariaHidden: "true" }, bar), make("span", { className: "value", textContent: one.probability === null ? "–" : percent(one.probability) }));
  }));
  const whole = make("figure", { className: "thumb" }, make("img", { src: explained.image, alt: `${name}, the model's input`, width: explained.width, height: explained.height }), make("figcaption", { textContent: "model input" }));
  $("maps").replaceChildren(whole, ...explained.maps.map(thumb));
  let step = explained.start;
  if (wanted) { picked = explained.maps.some((map) => map.method === wanted.method); chosen = wanted.method; step = stepAt(wanted.alpha); wanted = null; }
  if (!explained.maps.some((map) => map.method === chosen)) chosen = explained.maps[0].method;
  explained.maps.forEach((map) => showScores(map.method));
  choose(chosen, step);
};
const thumb = (map) => {
  const canvas = make("canvas", { width: explained.width, height: explained.height, ariaHidden: "true" });
  const found = make("button", { type: "button", className: "thumb" }, canvas, make("span", { textContent: map.method + (map.class_agnostic ? " (a)" : "") }), make("b"), make("small"));
  found.title = map.method + (map.class_agnostic ? `, ${AGNOSTIC}` : "");
  found.dataset.method = map.method;
  found.addEventListener("click", () => { picked = true; choose(map.method, now.scene && now.scene.key === map.method ? now.step : explained.start); });
  drawOverlay(canvas, sceneOf(map));
  return found;
};
const thumbOf = (method) => [...$("maps").querySelectorAll("button")].find((one) => one.dataset.method === method);

/* Regions: the server fits the map that is shown, when it is cut by size. */
const regionKey = (method) => JSON.stringify([method, explained.fields[0]]);
const askRegion = async (method, more, keep) => {
  const mine = run, key = regionKey(method);
  try {
    keep(key, await ask("/api/region", [explained.fields[0], ["method", method], ...more], mine.signal));
    if (key === regionKey(method) && method === chosen) choose(method, now.step);
  } catch (error) {
    if (!regions.get(key)) regions.delete(key);
    if (!mine.signal.aborted) complain(error.message);
  }
};
const fitRegion = (method) => {
  if (regions.has(regionKey(method))) return;
  regions.set(regionKey(method), null); /* under way */
  askRegion(method, [], (key, found) => regions.set(key, found));
};
const askSize = (method, size) => askRegion(method, [["size", size / 1000]], (key, found) => {
  const region = regions.get(key), [share, ...parts] = found.sizes[0];
  const placed = parts.map((part) => region.fills.map((fill) => part[found.fills.indexOf(fill)] ?? null)); /* in its order of fills */
  regions.set(key, { ...region, sizes: [...region.sizes.filter((one) => one[0] !== share), [share, ...placed]].sort((a, b) => a[0] - b[0]) });
});
const showScores = (method) => {
  const map = explained.maps.find((one) => one.method === method), found = scoresOf(method), button = thumbOf(method);
  button.querySelector("b").textContent = `MSI ${found ? signed(found.msi) : "…"}`;
  button.querySelector("small").textContent = map.empty ? "empty heatmap" : `${found ? plain(found.base_score) : "…"} − ${plain(map.mask_penalty)}`;
  button.ariaLabel = `${method}, ${found ? `MSI ${signed(found.msi)}, base score ${plain(found.base_score)}` : "not scored yet"}, mask penalty ${plain(map.mask_penalty)}${map.class_agnostic ? `, ${AGNOSTIC}` : ""}`;
  const values = explained.maps.map(worth), top = Math.max(...values);
  explained.maps.forEach((one, i) => thumbOf(one.method).classList.toggle("top-one", values[i] === top && top > -Infinity));
  if (method === chosen && now.scene && now.scene.key === method) choose(method, now.step);
};
const sceneOf = (map) => ({
  key: map.method, title: `${name}, ${map.method}`, target: explained.target.name, width: explained.width, height: explained.height,
  image: explained.image, map: map.map, values: map.values, fill: explained.fill, grid: explained.grid, start: explained.start, shares: map.shares,
  curves: scoresOf(map.method)?.curves ?? null, classes: scoresOf(map.method)?.classes ?? {}, waiting: "not computed yet",
  region: regions.get(regionKey(map.method)) ?? null, fit: () => fitRegion(map.method), ask: regions.get(regionKey(map.method)) ? (size) => askSize(map.method, size) : null,
});
const choose = (method, step) => {
  chosen = method;
  $("get-link").hidden = explained.example === null;
  $("maps").querySelectorAll("button").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.method === method)));
  const strip = $("maps"), shown = thumbOf(method), left = shown.offsetLeft - strip.offsetLeft; /* into sight, in a strip that scrolls */
  if (left < strip.scrollLeft || left + shown.offsetWidth > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = left - 12;
  return present(sceneOf(explained.maps.find((map) => map.method === method)), Math.min(step, explained.grid.length - 1));
};

/* What can be taken away: the map, the mask, the numbers, and for an example a link. */
const download = (address, ending) => make("a", { href: address, download: `${explained.name.replace(/\.[^.]*$/, "").replace(/[^\p{L}\p{N}_-]+/gu, "-").slice(0, 60) || "image"}-${chosen.replace(/[^\w+-]+/g, "-").slice(0, 60)}-${ending}` }).click();
$("get-map").addEventListener("click", () => download(explained.maps.find((map) => map.method === chosen).values, "map.png"));
$("get-mask").addEventListener("click", async () => {
  const { scene, step } = now, { width, height } = scene, map = await pixelsOf(scene.map, scene);
  const canvas = make("canvas", { width, height }), drawn = new ImageData(width, height);
  const inside = bySize() ? await regionOf(scene, now.size) : Array.from({ length: width * height }, (_, p) => map[4 * p] > step);
  inside.forEach((marked, p) => drawn.data.set(marked ? [255, 255, 255, 255] : [0, 0, 0, 255], 4 * p));
  canvas.getContext("2d").putImageData(drawn, 0, 0);
  download(canvas.toDataURL("image/png"), `mask-${bySize() ? `size-${now.size / 1000}` : scene.grid[step].toFixed(2)}.png`);
});
const regionFacts = () => { const { order, ...region } = regions.get(regionKey(chosen)) ?? {}; return order ? region : null; };
$("get-numbers").addEventListener("click", () => {
  const { maps, image, fill, fields, ...facts } = explained, shares = maps.find((map) => map.method === chosen).shares;
  const told = { model: data.model, sufficit: data.version, image: explained.name, method: chosen, alpha: now.scene.grid[now.step], ...facts, shares, scores: scoresOf(chosen) ?? null, region: regionFacts() };
  const address = URL.createObjectURL(new Blob([JSON.stringify(told, null, 1)], { type: "application/json" }));
  download(address, "numbers.json");
  setTimeout(() => URL.revokeObjectURL(address), 60000);
});
const FIELDS = ["target", "alpha_min", "fill", "score", "value_step"];
const linkNow = () => {
  const words = { example: explained.example, method: chosen, alpha: now.scene.grid[now.step].toFixed(4).replace(/0+$/, ""), methods: methods().join(",") };
  if (bySize()) words.size = now.size / 1000;
  FIELDS.forEach((id) => { if ($(id).value !== data.settings[id]) words[id] = $(id).value; });
  return `${location.href.split("#")[0]}#${new URLSearchParams(words)}`;
};
$("get-link").addEventListener("click", async () => {
  const link = linkNow();
  history.replaceState(null, "", link);
  try { await navigator.clipboard.writeText(link); inform("The link is copied: it opens this image, method and cut."); } catch { inform("The link is in the address bar: it opens this image, method and cut."); }
});
const stepAt = (alpha) => explained.grid.reduce((near, value, step) => (Math.abs(value - alpha) < Math.abs(explained.grid[near] - alpha) ? step : near), 0);
const openLink = () => {
  const words = new URLSearchParams(location.hash.slice(1)), number = Number(words.get("example"));
  if (!words.has("example")) return;
  if (!Number.isInteger(number) || number < 0 || number >= data.examples.length) { complain("The link asks for an example that this server does not have: choose an image."); return; }
  FIELDS.forEach((id) => { const value = words.get(id); if (value !== null) $(id).value = value; });
  const asked = (words.get("methods") || "").split(",");
  if (words.has("methods")) document.querySelectorAll('[name="methods"]').forEach((box) => { box.checked = asked.includes(box.value); });
  wanted = { method: words.get("method"), alpha: Number(words.get("alpha")) || 0 };
  if (Number(words.get("size")) > 0) { now.byUser = "region"; now.linked = Math.min(1000, 5 * Math.max(1, Math.round(200 * Number(words.get("size"))))); }
  takeExample(number);
};

/* Images: chosen, dropped, pasted, or the example. */
const take = (found, called, number = null) => {
  if (found.size > data.bytes) { run?.abort(); complain(`The file is too large, the limit is ${data.bytes / 1e6} MB: choose a smaller one.`); return; }
  if (!found.size) { run?.abort(); complain("The file is empty: choose another."); return; }
  file = found; name = called || "the image"; example = number; picked = false;
  scored.clear(); regions.clear();
  now.scene = null;
  start();
};
$("file").addEventListener("change", () => { const [found] = $("file").files; if (found) take(found, found.name); });
const takeExample = async (number) => {
  try {
    const answer = await fetch(`/api/examples/${number}`);
    if (!answer.ok) throw new Error();
    take(await answer.blob(), data.examples[number], number);
  } catch { complain("The server does not answer: check that it still runs."); }
};
document.querySelectorAll("[data-example]").forEach((button) => button.addEventListener("click", () => takeExample(Number(button.dataset.example))));
document.addEventListener("paste", (event) => { const [found] = event.clipboardData.files; if (found) { event.preventDefault(); take(found, "The pasted image"); } });
document.addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over-it"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").classList.remove("over-it"); });
document.addEventListener("drop", (event) => { event.preventDefault(); $("drop").classList.remove("over-it"); const [found] = event.dataTransfer.files; if (found) take(found, found.name); });
$("settings").addEventListener("submit", (event) => { event.preventDefault(); start(); });
$("settings").addEventListener("change", () => { clearTimeout(pause); pause = setTimeout(start, PAUSE); });
window.addEventListener("hashchange", openLink);
openLink();
document.documentElement.dataset.ready = "yes";
