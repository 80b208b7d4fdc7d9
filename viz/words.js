// What is shared by all parts of the page, what it says, and how boxes look. All files run as one function.
const model = JSON.parse(document.getElementById("data").textContent);
const style = model.style;
const SVG = "http://www.w3.org/2000/svg";
const MANY = 400;     // more boxes than this take long to lay out
const LONGEST = 48;   // characters in a box
const $ = (id) => document.getElementById(id);
const short = (dtype) => style.short[dtype] || dtype;
const bits = Object.fromEntries(Object.entries(style.bits).map(([dtype, count]) => [short(dtype), count]));

const seen = model.graphs.map(() => null);  // graph -> what is visible of it, made when first shown
let graph = null, visible = null;
let hits = [], current = -1, selected = "";
let bounds = { width: 100, height: 100 };   // of the drawing
let box = { x: 0, y: 0, w: 100, h: 100 };   // what the window shows of it

// --- text ---

function size(bytes) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (bytes >= unit) return Number((bytes / unit).toPrecision(3)) + " " + name;
  return bytes + " B";
}

function perCent(part, whole) {
  const share = whole ? (100 * part) / whole : 0;
  return (share >= 9.95 || !share ? share.toFixed(0) : share.toFixed(1)) + "\u00a0%";
}

const sum = (casts) => casts.reduce((total, cast) => total + cast.bytes, 0);
const clip = (text, length) => (text.length > length ? text.slice(0, length - 1) + "\u2026" : text);
const isReal = (cast) => cast.kernel !== false;
const colourOf = (dtype) => (style.dtypes.includes(dtype) ? `var(--${dtype})` : "var(--plain)");
const inkOn = (dtype) => (style.dtypes.includes(dtype) ? `var(--on-${dtype})` : "var(--ink)");
const lowers = (cast) => (bits[cast.after] || 8) <= (bits[cast.before] || 8);

// calls by dtype, most frequent first
function mix(leaves) {
  const found = new Map();
  for (const leaf of leaves) {
    const { kind, dtype } = graph.nodes[leaf];
    if (kind === "call" && dtype) found.set(dtype, (found.get(dtype) || 0) + 1);
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}

// a line per direction: "fp32 -> bf16  1.5 MB in 2 casts, fused"
function castLines(casts) {
  const found = new Map();
  for (const cast of casts) {
    const key = JSON.stringify([cast.before, cast.after, cast.mark]);
    found.set(key, [...(found.get(key) || []), cast]);
  }
  return [...found.values()].map((rows) => {
    const [{ before, after, mark }] = rows;
    const fused = rows.filter((cast) => cast.kernel === false).length;
    const fate = !fused ? "" : fused === rows.length ? ", fused" : ", " + fused + " fused";
    const times = rows.length > 1 ? " in " + rows.length + " casts" : "";
    return before + " \u2192 " + after + "  " + size(sum(rows)) + times + fate + (mark && ", " + mark);
  });
}

function castText(cast) {
  const fate = { true: ", a kernel of its own", false: ", fused into another kernel: moves nothing of its own", null: "" }[cast.kernel];
  const shared = cast.readers > 1 ? ", shared by " + cast.readers + " readers" : "";
  return cast.name + ": " + cast.before + " \u2192 " + cast.after + ", " + size(cast.bytes) + shared + fate +
    (cast.mark && ", " + cast.mark + " since the earlier report");
}

function listed(lines, most) {
  return lines.length > most ? [...lines.slice(0, most), "... and " + (lines.length - most) + " more"] : lines;
}

function describeGroup(index) {
  const row = graph.groups[index], times = visible.times(index), casts = visible.inside[index];
  const bytes = row.leaves.reduce((total, leaf) => total + graph.nodes[leaf].bytes, 0);
  const lines = [visible.title(index) + (times > 1 ? "   equal blocks, drawn once; numbers are of one" : "")];
  lines.push(mix(row.leaves).map(([dtype, n]) => n + " calls in " + dtype).join(", ") || "no floating computation");
  if (casts.length) lines.push("casts inside: " + castLines(casts).join("; "));
  lines.push("results: " + size(bytes), "click to open");
  return lines.join("\n");
}

function describeNode(index) {
  const node = graph.nodes[index], call = node.kind === "call";
  const lines = [node.label + (node.module ? "   in " + node.module : "")];
  lines.push(call ? "computes in " + (node.dtype || "no floating dtype") : node.kind + ", " + (node.dtype || "no floating dtype"));
  if (node.was) lines.push("earlier: " + node.was);
  lines.push("why: " + node.reason + (call ? "   [" + node.op_class + "]" : ""));
  const flops = node.flops ? ", " + (node.flops / 1e9).toPrecision(3) + " GFLOP" : "";
  lines.push("result: [" + node.shape.join(", ") + "], " + size(node.bytes) + flops);
  if (node.source) lines.push("source: " + node.source);
  lines.push("name: " + node.name);
  return lines.join("\n");
}

const describe = (id) => (id[0] === "g" ? describeGroup : describeNode)(Number(id.slice(1)));
const describeEdge = (casts) => ["casts on this edge", ...listed(casts.map(castText), 12)].join("\n");

// while the pointer is on something: what its box does not say. The panel has the rest
function hint(id) {
  const index = Number(id.slice(1));
  if (id[0] === "g") {
    const casts = visible.inside[index];
    return (casts.length ? "casts inside: " + castLines(casts).join("; ") + "\n" : "") + "click to open";
  }
  const { module, reason } = graph.nodes[index];
  return (module ? "in " + module + "\n" : "") + "why: " + reason;
}
const hintEdge = (casts) => listed(casts.map(castText), 1).join("\n");

// --- looks ---

function make(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

const ruler = document.createElement("canvas").getContext("2d");
function width(text, font) {
  ruler.font = font + " system-ui, 'DejaVu Sans', sans-serif";
  return ruler.measureText(text).width;
}

// what rounding costs where that was measured, else the dtype. Those colours are light in a dark window, too
const isHot = style.heatSamples.length > 0;
const hottest = (leaves) => style.heat[Math.max(0, ...leaves.map((leaf) => graph.nodes[leaf].heat))];
const inkHot = "#111111";

// what a box says and how it looks
function face(id) {
  const index = Number(id.slice(1));
  if (id[0] === "n") {
    const node = graph.nodes[index];
    const sub = node.was ? short(node.was) + " \u21d2 " + (short(node.dtype) || "none") : short(node.dtype);
    return { lines: [clip(node.label, LONGEST), sub, node.sensitivity].filter(Boolean),
      fill: isHot ? style.heat[node.heat] : colourOf(node.dtype), ink: isHot ? inkHot : inkOn(node.dtype),
      mix: [], border: style.classes[node.op_class], changed: Boolean(node.was) };
  }
  const row = graph.groups[index], found = mix(row.leaves), casts = visible.inside[index];
  const moved = casts.some(isReal) ? size(sum(casts.filter(isReal))) : "fused";
  const each = visible.times(index) > 1 && found.length ? "each: " : "";
  const op = row.main === null ? "" : ": " + graph.nodes[row.main].op;
  return {
    lines: ["+ " + clip(visible.title(index), LONGEST) + op,
      each + found.map(([dtype, n]) => n + " in " + short(dtype)).join(", "),
      casts.length ? casts.length + (casts.length > 1 ? " casts" : " cast") + " inside, " + moved : ""].filter(Boolean),
    fill: isHot ? hottest(row.leaves) : tint(visible.times(index) * sum(casts.filter(isReal)) / Math.max(castBytes(), 1)),
    ink: isHot ? inkHot : "var(--ink)",
    mix: found,
    border: row.main === null ? ["", "", 1.6] : style.classes[graph.nodes[row.main].op_class],
    changed: row.leaves.some((leaf) => graph.nodes[leaf].was),
  };
}

// bytes of the casts in the graph that Inductor does not fuse
function castBytes() {
  if (graph.castBytes === undefined) {
    const found = new Map(graph.edges.flatMap((edge) => edge.casts).filter(isReal).map((cast) => [cast.name, cast]));
    graph.castBytes = sum([...found.values()]);
  }
  return graph.castBytes;
}

// a closed module, by its share of what casts move
const tint = (share) => `color-mix(in srgb, var(--tint) ${(75 * Math.sqrt(Math.min(share, 1))).toFixed(1)}%, var(--paper))`;

// an edge is as wide as the bytes of its casts; those that are fused are thin and fade
function castLook(casts, dearest) {
  const colour = casts.every(lowers) ? "lower" : "widen";
  const real = sum(casts.filter(isReal));
  const isFused = casts.every((cast) => cast.kernel === false);
  const removed = casts.every((cast) => cast.mark === "removed") ? " removed" : "";
  return { colour, name: "edge cast" + (isFused ? " fused" : "") + removed, wide: isFused ? 1.2 : 1.6 + 8.4 * real / Math.max(dearest, 1) };
}

