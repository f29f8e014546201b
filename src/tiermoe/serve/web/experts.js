"use strict";
// Figures

const short = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const percent = (part, all) => all ? short(100 * part / all) + " %" : "–";

function bytes(value) {
  const unit = Math.min(4, Math.floor(Math.log2(Math.max(value, 1)) / 10));
  return short(value / 2 ** (10 * unit)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}

const SPAN = 5000; // milliseconds that “now” looks back
let samples = []; // [when, stats] of that time, while something ran
let rates = null; // of the latest samples; they stay when nothing runs

function sampled(now) {
  const when = performance.now();
  samples = now.running ? [...samples.filter(([then]) => when - then < SPAN), [when, now]] : [];
  if (samples.length < 2) return;
  const [[then, before]] = samples, seconds = (when - then) / 1000;
  const since = (name) => now[name] - before[name];
  const used = since("expert_hits") + since("expert_misses");
  rates = {
    tokens: since("generated_tokens") ? short(since("generated_tokens") / seconds) : "–",
    hits: percent(since("expert_hits"), used),
    waited: percent(Math.min(since("wait_s"), seconds), seconds),
    read: bytes(since("bytes_read") / seconds) + "/s",
  };
}

function figures(now) {
  sampled(now);
  const pace = now.running ? "The last " + SPAN / 1000 + " seconds:" : rates ? "Nothing runs. The last seconds in which something ran:" : "Nothing runs.";
  tell("pace", pace);
  const fits = Math.min(now.cache_slots, now.all_experts);
  const tiles = [
    ["Tokens a second", rates?.tokens ?? "–", now.generated_tokens.toLocaleString("en") + " in all"],
    ["Hit rate", rates?.hits ?? "–", percent(now.expert_hits, now.expert_hits + now.expert_misses) + " since the start"],
    ["Waited for experts", rates?.waited ?? "–", short(now.wait_s) + " s since the start"],
    ["Read", rates?.read ?? "–", bytes(now.bytes_read) + " since the start"],
    ["Room for experts", percent(fits, now.all_experts), fits.toLocaleString("en") + " of " + now.all_experts.toLocaleString("en")],
    ["Memory", bytes(now.peak_memory_bytes), now.memory_budget_bytes ? "at most, of " + bytes(now.memory_budget_bytes) : "at most"],
    ["Requests", String(now.running), now.waiting + " wait; " + now.rows + " may run at once"],
    ["Prompts", now.prompt_tokens.toLocaleString("en"), "tokens read; " + now.cached_tokens.toLocaleString("en") + " were kept"],
  ];
  by("figures").replaceChildren(...tiles.map(([name, value, detail]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value), make("dd", { className: "detail" }, detail))));
}

function budgets(now) {
  const rows = now.other_budgets.filter((each) => each.slots >= now.cache_slots);
  by("budgets").hidden = rows.length < 2;
  by("others").replaceChildren(...rows.map((each) => make("tr", { className: each.slots === now.cache_slots ? "now" : "" },
    make("th", { scope: "row" }, bytes(each.memory_bytes) + (each.slots === now.cache_slots ? ", now" : "")),
    ...[percent(each.slots, now.all_experts), percent(each.hit_rate, 1), short(each.decode_tok_s)].map((text) => make("td", {}, text)))));
}

// The map

let found = null; // what /experts says
let at = null; // [layer, expert] that is looked at
let grid = {}; // where experts are painted: { columns, lines, width, height, layer }

// A layer has as many lines as its experts need, of cells that can be told apart; layer: pixels from one to the next.
function measure() {
  const most = Math.max(...found.layers.map((layer) => layer.bits.length), 1), room = by("map").clientWidth - 6;
  const lines = Math.ceil(most / Math.max(1, Math.floor(room / 5))), columns = Math.ceil(most / lines);
  const width = Math.max(1, Math.min(26, Math.floor(room / columns))), height = Math.max(6, Math.min(18, width));
  grid = { columns, lines, width, height, layer: lines * height + (lines > 1 ? 3 : 0) };
}

const corner = (row, column) => [column % grid.columns * grid.width, row * grid.layer + Math.floor(column / grid.columns) * grid.height];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const parts = (hex) => [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16));

function between(low, high, share) {
  const [from, to] = [parts(colour(low)), parts(colour(high))];
  return "rgb(" + from.map((value, index) => Math.round(value + share * (to[index] - value))).join(",") + ")";
}

// How an expert is painted: the place of its colour in the legend.
function legend() {
  const all = found.layers.flatMap((layer) => layer.bits.map((bits, expert) => [bits, layer.arriving[expert], layer.uses[expert]]));
  if (document.querySelector("[name=colour]:checked").value === "uses") {
    const most = all.reduce((highest, [, , uses]) => Math.max(highest, uses), 0);
    const place = (uses) => uses ? 1 + Math.round(6 * Math.sqrt(uses / most)) : 0;
    const entries = [["never used", colour("--absent")]];
    for (let step = 0; step <= 6; step++) entries.push(["", between("--cold", "--hot", step / 6)]);
    if (most) entries[7][0] = "used by " + most.toLocaleString("en") + (most === 1 ? " token" : " tokens");
    return { entries: most ? entries : entries.slice(0, 1), place: (layer, expert) => place(layer.uses[expert]) };
  }
  const levels = [...found.precisions].reverse();
  const count = (bits) => all.filter((each) => each[0] === bits && (bits || !each[1])).length.toLocaleString("en");
  const entries = [["not in memory: " + count(0), colour("--absent")],
    ["being read: " + all.filter(([bits, arriving]) => !bits && arriving).length, colour("--reading")]];
  levels.forEach((bits, index) => entries.push([bits + " bits: " + count(bits),
    between("--low", "--high", levels.length > 1 ? index / (levels.length - 1) : 0.6)]));
  const place = (layer, expert) => layer.bits[expert] ? 2 + levels.indexOf(layer.bits[expert]) : layer.arriving[expert] ? 1 : 0;
  return { entries, place };
}

function draw() {
  if (!found || by("experts").hidden) return;
  const canvas = by("cells"), { entries, place } = legend();
  const scale = devicePixelRatio || 1;
  measure();
  const gap = grid.width > 5 ? 1 : 0, [width, height] = [grid.columns * grid.width, found.layers.length * grid.layer];
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  found.layers.forEach((layer, row) => layer.bits.forEach((_, column) => {
    pen.fillStyle = entries[place(layer, column)][1];
    pen.fillRect(...corner(row, column), grid.width - gap, grid.height - 1);
  }));
  if (at) {
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 2;
    pen.strokeRect(...corner(...at), grid.width - gap, grid.height - 1);
  }
  by("legend").replaceChildren(...entries.map(([text, fill]) => {
    const mark = make("i");
    mark.style.background = fill;
    return make("span", {}, mark, text);
  }));
  canvas.ariaLabel = "Experts, " + found.layers.length + " layers. " + entries.map(([text]) => text).filter(Boolean).join(", ");
}

function look(row, column) {
  if (!found?.layers.length) return;
  row = Math.max(0, Math.min(found.layers.length - 1, row));
  const layer = found.layers[row];
  column = Math.max(0, Math.min(layer.bits.length - 1, column));
  at = [row, column];
  tell("cell", describe(row, column));
  draw();
}

function describe(row, column) {
  const layer = found.layers[row];
  const here = layer.bits[column] ? "in memory with " + layer.bits[column] + " bits" : "not in memory";
  const coming = layer.arriving[column] ? ", " + layer.arriving[column] + " bits are being read" : "";
  return "MoE layer " + row + ", expert " + column + ": " + here + coming + "; used by " + layer.uses[column].toLocaleString("en") + " tokens.";
}

function hint() {
  const none = found.layers.every((layer) => layer.uses.every((uses) => !uses));
  const all = found.layers.every((layer) => layer.bits.every((bits) => bits));
  const why = none && all ? " Uses are counted while experts come and go; here all are in memory." : "";
  return "Point at an expert or touch it, or walk with the arrow keys." + why;
}

function point({ offsetX, offsetY }) {
  const row = Math.floor(offsetY / grid.layer);
  const line = Math.min(grid.lines - 1, Math.floor((offsetY - row * grid.layer) / grid.height));
  look(row, line * grid.columns + Math.min(grid.columns - 1, Math.floor(offsetX / grid.width)));
}

for (const name of ["pointermove", "pointerdown"]) by("cells").addEventListener(name, point);
by("cells").addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  look(...(at ? [at[0] + step[0], at[1] + step[1]] : [0, 0]));
});
for (const each of document.querySelectorAll("[name=colour]")) each.addEventListener("change", draw);
addEventListener("resize", draw);

async function watch() {
  for (;; await sleep(1000)) {
    if (by("experts").hidden || document.hidden || !model) continue;
    try {
      const its = "?model=" + encodeURIComponent(model);
      const stats = await (await ask("stats" + its)).json();
      figures(stats);
      budgets(stats);
      found = await (await ask("experts" + its)).json();
      notice("");
      draw();
      tell("cell", at ? describe(...at) : hint());
    } catch (error) {
      notice(error.message, true);
    }
  }
}
