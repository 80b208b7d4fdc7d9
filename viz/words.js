// What is shared by all parts of the page, what it says, and how boxes look. All files run as one function.
const model = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const MANY = 400;     // more boxes than this take long to lay out
const LONGEST = 48;   // characters in a box
const $ = (id) => document.getElementById(id);

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

const sum = (casts) => casts.reduce((total, cast) => total + cast.bytes, 0);
const clip = (text, length) => (text.length > length ? text.slice(0, length - 1) + "\u2026" : text);
const isReal = (cast) => cast.kernel !== false;

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

function describe(id) {
  if (id[0] === "n") return graph.nodes[id.slice(1)].details;
  const { times, inside, details } = graph.groups[id.slice(1)], equal = visible.folded && times > 1;
  return [visible.title(id.slice(1)) + (equal ? "   equal blocks, drawn once; numbers are of one" : ""),
    inside, details, "click to open"].filter(Boolean).join("\n");
}
const describeEdge = (casts) => ["casts on this edge", ...listed(casts.map(castText), 12)].join("\n");

// while the pointer is on something: what its box does not say. The panel has the rest
function hint(id) {
  if (id[0] === "g") return [graph.groups[id.slice(1)].inside, "click to open"].filter(Boolean).join("\n");
  const { module, reason } = graph.nodes[id.slice(1)];
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

// what a box says and how it looks; a closed module is tinted by its share of what casts move
function face(id) {
  const row = (id[0] === "n" ? graph.nodes : graph.groups)[id.slice(1)];
  const { lines: [title, ...lines], fill, share, ...look } = visible.folded ? row.face : row.each || row.face;
  const tint = (75 * Math.sqrt(Math.min(share, 1))).toFixed(1);
  return { ...look, lines: [(id[0] === "n" ? "" : "+ ") + clip(title, LONGEST), ...lines], mix: row.mix || [],
    fill: fill || `color-mix(in srgb, var(--tint) ${tint}%, var(--paper))` };
}

// an edge is as wide as the bytes of its casts; those that are fused are thin and fade
function castLook(casts, dearest) {
  const colour = casts.every((cast) => cast.narrows) ? "lower" : "widen";
  const real = sum(casts.filter(isReal));
  const isFused = casts.every((cast) => cast.kernel === false);
  const removed = casts.every((cast) => cast.mark === "removed") ? " removed" : "";
  return { colour, name: "edge cast" + (isFused ? " fused" : "") + removed, wide: isFused ? 1.2 : 1.6 + 8.4 * real / Math.max(dearest, 1) };
}

