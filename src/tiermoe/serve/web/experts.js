"use strict";
// Figures

const short = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const counted = (count, noun) => short(count) + " " + noun + (count === 1 ? "" : "s");
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
  setText("pace", pace);
  const fits = Math.min(now.cache_slots, now.all_experts);
  const tiles = [
    ["Tokens a second", rates?.tokens ?? "–", short(now.generated_tokens) + " in all"],
    ["Hit rate", rates?.hits ?? "–", percent(now.expert_hits, now.expert_hits + now.expert_misses) + " since the start"],
    ["Waited for experts", rates?.waited ?? "–", short(now.wait_s) + " s since the start"],
    ["Read", rates?.read ?? "–", bytes(now.bytes_read) + " since the start"],
    ["Room for experts", percent(fits, now.all_experts), short(fits) + " of " + short(now.all_experts)],
    ["Memory", bytes(now.peak_memory_bytes), now.memory_budget_bytes ? "at most, of " + bytes(now.memory_budget_bytes) : "at most"],
    ["Requests", String(now.running), now.waiting + " wait; " + now.rows + " may run at once"],
    ["Prompts", short(now.prompt_tokens), "tokens read; " + short(now.cached_tokens) + " were kept"],
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

let latest = null; // what /experts says
let selected = null; // [layer, expert] whose description is shown
let grid = {}; // where experts are painted: { columns, lines, width, height, layer }

// A layer has as many lines as its experts need, of cells that can be told apart; layer: pixels from one to the next.
function layOut() {
  const most = Math.max(...latest.layers.map((layer) => layer.bits.length), 1), room = by("map").clientWidth - 6;
  const lines = Math.ceil(most / Math.max(1, Math.floor(room / 5))), columns = Math.ceil(most / lines);
  const width = Math.max(1, Math.min(26, Math.floor(room / columns))), height = Math.max(6, Math.min(18, width));
  grid = { columns, lines, width, height, layer: lines * height + (lines > 1 ? 3 : 0) };
}

const corner = (row, column) => [column % grid.columns * grid.width, row * grid.layer + Math.floor(column / grid.columns) * grid.height];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const between = (low, high, share) => "color-mix(in srgb, " + colour(high) + " " + 100 * share + "%, " + colour(low) + ")";

// The legend, as [text, colour], and the place in it of an expert of a layer.
function legend() {
  if (document.querySelector("[name=colour]:checked").value === "uses") {
    const most = Math.max(0, ...latest.layers.map(({ uses }) => Math.max(0, ...uses)));
    const entries = [["never used", colour("--absent")]];
    for (let step = 0; most && step <= 6; step++) {
      entries.push([step < 6 ? "" : "used by " + counted(most, "token"), between("--cold", "--hot", step / 6)]);
    }
    return { entries, place: ({ uses }, expert) => uses[expert] && 1 + Math.round(6 * Math.sqrt(uses[expert] / most)) };
  }
  const levels = [...latest.precisions].reverse();
  const place = ({ bits, arriving }, expert) => bits[expert] ? 2 + levels.indexOf(bits[expert]) : arriving[expert] ? 1 : 0;
  const entries = [["not in memory", colour("--absent")], ["being read", colour("--reading")], ...levels.map((bits, index) =>
    [bits + " bits", between("--low", "--high", levels.length > 1 ? index / (levels.length - 1) : 0.6)])];
  const places = latest.layers.flatMap((layer) => layer.bits.map((_, expert) => place(layer, expert)));
  entries.forEach((entry, index) => entry[0] += ": " + short(places.filter((each) => each === index).length));
  return { entries, place };
}

function draw() {
  if (!latest || by("experts").hidden) return;
  const canvas = by("cells"), { entries, place } = legend();
  const scale = devicePixelRatio;
  layOut();
  const gap = grid.width > 5 ? 1 : 0, [width, height] = [grid.columns * grid.width, latest.layers.length * grid.layer];
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  latest.layers.forEach((layer, row) => layer.bits.forEach((_, column) => {
    pen.fillStyle = entries[place(layer, column)][1];
    pen.fillRect(...corner(row, column), grid.width - gap, grid.height - 1);
  }));
  if (selected) {
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 2;
    pen.strokeRect(...corner(...selected), grid.width - gap, grid.height - 1);
  }
  by("legend").replaceChildren(...entries.map(([text, fill]) => {
    const mark = make("i");
    mark.style.background = fill;
    return make("span", {}, mark, text);
  }));
  canvas.ariaLabel = "Experts, " + latest.layers.length + " layers. " + entries.map(([text]) => text).filter(Boolean).join(", ");
}

function select(row, column) {
  if (!latest?.layers.length) return;
  row = Math.max(0, Math.min(latest.layers.length - 1, row));
  const layer = latest.layers[row];
  column = Math.max(0, Math.min(layer.bits.length - 1, column));
  selected = [row, column];
  setText("cell", describe(row, column));
  draw();
}

function describe(row, column) {
  const layer = latest.layers[row];
  const resident = layer.bits[column] ? "in memory with " + layer.bits[column] + " bits" : "not in memory";
  const arriving = layer.arriving[column] ? ", " + layer.arriving[column] + " bits are being read" : "";
  return "MoE layer " + row + ", expert " + column + ": " + resident + arriving + "; used by " + counted(layer.uses[column], "token") + ".";
}

function hint() {
  const none = latest.layers.every((layer) => layer.uses.every((uses) => !uses));
  const all = latest.layers.every((layer) => layer.bits.every((bits) => bits));
  const why = none && all ? " Uses are counted while experts come and go; here all are in memory." : "";
  return "Point at an expert or touch it, or walk with the arrow keys." + why;
}

function selectAt({ offsetX, offsetY }) {
  const row = Math.floor(offsetY / grid.layer);
  const line = Math.min(grid.lines - 1, Math.floor((offsetY - row * grid.layer) / grid.height));
  select(row, line * grid.columns + Math.min(grid.columns - 1, Math.floor(offsetX / grid.width)));
}

by("cells").onpointermove = by("cells").onpointerdown = selectAt;
by("cells").onkeydown = (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  select(...(selected ? [selected[0] + step[0], selected[1] + step[1]] : [0, 0]));
};
document.querySelector("fieldset").onchange = window.onresize = draw;

async function watch() {
  for (;; await sleep(1000)) {
    if (by("experts").hidden || document.hidden || !model) continue;
    try {
      const query = "?model=" + encodeURIComponent(model);
      const stats = await (await ask("stats" + query)).json();
      figures(stats);
      budgets(stats);
      latest = await (await ask("experts" + query)).json();
      notice("");
      draw();
      setText("cell", selected ? describe(...selected) : hint());
    } catch (error) {
      notice(error.message, true);
    }
  }
}
