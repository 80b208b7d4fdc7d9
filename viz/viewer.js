// Draws one graph of the model at a time.
"use strict";
(() => {
const model = JSON.parse(document.getElementById("data").textContent);
const style = model.style;
const SVG = "http://www.w3.org/2000/svg";
const SHORT = { bfloat16: "bf16", float16: "fp16", float32: "fp32", float64: "fp64" };
const BITS = { bf16: 16, fp16: 16, fp32: 32, fp64: 64 };
const MANY = 400;     // more boxes than this take long to lay out
const LONGEST = 48;   // characters in a box
const $ = (id) => document.getElementById(id);
const short = (dtype) => SHORT[dtype] || dtype;

const seen = model.graphs.map(() => null);  // graph -> what is visible of it, made when first shown
let graph = null, visible = null;
let hits = [], current = -1;
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
const lowers = (cast) => (BITS[cast.after] || 8) <= (BITS[cast.before] || 8);

// calls by dtype, most frequent first
function mix(leaves) {
  const found = new Map();
  for (const leaf of leaves) {
    const { kind, dtype } = graph.nodes[leaf];
    if (kind === "call" && dtype) found.set(dtype, (found.get(dtype) || 0) + 1);
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}

// a line per direction: "fp32 -> bf16  2x 1.5 MB, fused"
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
    const times = rows.length > 1 ? rows.length + "\u00d7 " : "";
    return before + " \u2192 " + after + "  " + times + size(sum(rows)) + fate + (mark && ", " + mark);
  });
}

function castText(cast) {
  const fate = { true: ", a kernel of its own", false: ", fused into another kernel", null: "" }[cast.kernel];
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

// what rounding costs where that was measured, else the dtype
const isHot = style.heatSamples.length > 0;
const fillOf = (node) => (isHot ? style.heat[node.heat] : style.dtypes[node.dtype]);
const hottest = (leaves) => style.heat[Math.max(0, ...leaves.map((leaf) => graph.nodes[leaf].heat))];

// what a box says and how it looks
function face(id) {
  const index = Number(id.slice(1));
  if (id[0] === "n") {
    const node = graph.nodes[index];
    const sub = node.was ? short(node.was) + " \u21d2 " + (short(node.dtype) || "none") : short(node.dtype);
    return { lines: [clip(node.label, LONGEST), sub, node.harm].filter(Boolean), fill: fillOf(node),
      border: style.classes[node.op_class], changed: Boolean(node.was) };
  }
  const row = graph.groups[index], found = mix(row.leaves), casts = visible.inside[index];
  const op = row.main === null ? "" : ": " + graph.nodes[row.main].op;
  return {
    lines: ["+ " + clip(visible.title(index), LONGEST) + op,
      found.map(([dtype, n]) => n + " in " + short(dtype)).join(", "),
      casts.length ? casts.length + (casts.length > 1 ? " casts" : " cast") + " inside, " + size(sum(casts)) : ""].filter(Boolean),
    fill: isHot ? hottest(row.leaves) : found.length === 1 ? style.dtypes[found[0][0]] : found.length ? style.mixed : null,
    border: row.main === null ? ["", "", 1.6] : style.classes[graph.nodes[row.main].op_class],
    changed: row.leaves.some((leaf) => graph.nodes[leaf].was),
  };
}

function castLook(casts) {
  const colour = casts.every(lowers) ? "lower" : "widen";
  const fused = casts.every((cast) => cast.kernel === false) ? " fused" : "";
  const removed = casts.every((cast) => cast.mark === "removed") ? " removed" : "";
  return { colour, name: "edge cast" + fused + removed };
}

// --- drawing ---

function gatherEdges(ids) {
  const edges = new Map();
  for (const edge of graph.edges) {
    const { tail, head, casts } = edge, from = ids[tail], to = ids[head];
    if (from === to || visible.isRepeated(edge)) continue;
    const key = from + ">" + to;
    if (!edges.has(key)) edges.set(key, { from, to, casts: new Map() });
    for (const cast of casts) edges.get(key).casts.set(cast.name + cast.mark, cast);
  }
  return edges;
}

function arrange(boxes, faces, edges) {
  const layout = new dagre.graphlib.Graph({ compound: true });
  layout.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 32, edgesep: 12, marginx: 20, marginy: 24,
    ranker: boxes.length > 250 ? "longest-path" : "network-simplex" });
  layout.setDefaultEdgeLabel(() => ({}));
  for (const id of boxes) {
    const [title, ...rest] = faces.get(id).lines;
    const widest = Math.max(width(title, "12px"), ...rest.map((line) => width(line, "10.5px")));
    layout.setNode(id, { width: widest + 24 + (id[0] === "n" && graph.nodes[Number(id.slice(1))].kind !== "call" ? 16 : 0),
      height: 14 + 13 * faces.get(id).lines.length });
  }
  for (const id of boxes) {
    const index = Number(id.slice(1));
    let child = id, parent = id[0] === "g" ? graph.groups[index].parent : graph.nodes[index].group;
    for (; parent; parent = graph.groups[parent].parent) {
      const name = "c" + parent, known = layout.hasNode(name);
      if (!known) layout.setNode(name, {});
      layout.setParent(child, name);
      if (known) break;
      child = name;
    }
  }
  for (const { from, to, casts } of edges.values()) {
    const lines = castLines([...casts.values()]);
    const wide = Math.max(0, ...lines.map((line) => width(line, "600 10.5px")));
    layout.setEdge(from, to, lines.length ? { width: wide + 14, height: lines.length * 14 + 5, labelpos: "c", lines } : {});
  }
  dagre.layout(layout);
  return layout;
}

function draw() {
  const ids = visible.boxes(), boxes = [...new Set(ids)];
  const faces = new Map(boxes.map((id) => [id, face(id)]));
  const edges = gatherEdges(ids);
  const layout = arrange(boxes, faces, edges);
  const scene = $("scene");
  scene.replaceChildren();
  const depth = (name) => graph.groups[Number(name.slice(1))].depth;
  const frames = layout.nodes().filter((name) => name[0] === "c").sort((a, b) => depth(a) - depth(b));
  const labels = [];
  // from inside to outside: a frame has room for the names of those inside it
  const nested = new Map();
  for (const name of [...frames].reverse()) {
    const parent = layout.parent(name), levels = nested.get(name) || 0;
    nested.set(name, levels);
    if (parent) nested.set(parent, Math.max(nested.get(parent) || 0, levels + 1));
  }
  for (const name of frames) drawFrame(scene, Number(name.slice(1)), layout.node(name), 10 + 9 * nested.get(name), labels);
  for (const { v, w } of layout.edges()) drawEdge(scene, layout.edge(v, w), edges.get(v + ">" + w), labels);
  for (const id of boxes) drawBox(scene, id, layout.node(id), faces.get(id));
  // last: no box or line may cover them
  scene.append(...labels);
  bounds = layout.graph();
  mark();
  const inside = graph.nodes.length - boxes.filter((id) => id[0] === "n").length;
  $("hidden").textContent = graph.nodes.length + " nodes in " + boxes.length + " boxes" +
    (inside ? "; " + inside + " nodes are inside closed or folded modules" : "");
}

function drawFrame(scene, index, at, room, labels) {
  const element = make("g", { class: "cluster", "data-id": "c" + index }, null);
  const left = at.x - at.width / 2, top = at.y - at.height / 2 - room, label = "\u2212 " + visible.title(index);
  const wide = width(label, "600 12px");
  const { fold } = graph.groups[index];
  const splits = fold !== null && visible.members.get(fold).length > 1;
  const link = visible.unfolded.has(fold) ? "fold equal blocks" : "show each";
  const least = wide + 16 + (splits ? width(link, "10.5px") + 14 : 0);
  make("rect", { class: "frame", x: left, y: top, width: Math.max(at.width, least), height: at.height + room + 8, rx: 6 }, scene);
  labels.push(element);
  make("text", { x: left + 8, y: top + 15 }, element, label);
  const title = make("rect", { class: "title", x: left, y: top, width: wide + 14, height: 20 }, element);
  title.addEventListener("click", () => change(() => visible.toggle(index), "c" + index));
  if (!splits) return;
  const split = make("text", { class: "split sub", x: left + wide + 20, y: top + 15, "data-fold": fold }, element, link);
  split.addEventListener("click", () => change(() => {
    if (!visible.unfolded.delete(fold)) visible.unfold(fold);
  }, "c" + index));
}

function drawEdge(scene, at, { from, to, casts: found }, labels) {
  const casts = [...found.values()];
  if (!casts.length) {
    const plain = make("g", { class: "edge", "data-from": from, "data-to": to }, scene);
    make("path", { d: curve(at.points), "marker-end": "url(#plain)" }, plain);
    return;
  }
  const { colour, name } = castLook(casts);
  const element = make("g", { class: name, "data-from": from, "data-to": to }, scene);
  make("path", { d: curve(at.points), style: "stroke:" + style[colour], "marker-end": `url(#${colour})` }, element);
  const label = make("g", { class: name, "data-from": from, "data-to": to }, null);
  const left = at.x - at.width / 2, top = at.y - at.height / 2;
  make("rect", { x: left, y: top, width: at.width, height: at.height, rx: 4, stroke: style[colour] }, label);
  at.lines.forEach((line, row) =>
    make("text", { x: at.x, y: top + 13.5 + 14 * row, "text-anchor": "middle", style: "fill:" + style[colour] }, label, line));
  labels.push(label);
  for (const part of [element, label]) {
    hover(part, () => describeEdge(casts));
    part.addEventListener("click", () => { $("details").textContent = describeEdge(casts); });
  }
}

function drawBox(scene, id, at, { lines, fill, border: [, dashes, thick], changed }) {
  const closed = id[0] === "g", index = Number(id.slice(1));
  const element = make("g", { class: "box" + (changed ? " changed" : ""), "data-id": id, tabindex: 0, role: "button",
    "aria-label": lines.join(", ") }, scene);
  const look = { class: "face", fill: fill || style.plain, "stroke-width": thick, "stroke-dasharray": dashes || "none" };
  const area = { x: at.x - at.width / 2, y: at.y - at.height / 2, width: at.width, height: at.height, rx: 4 };
  if (closed) make("rect", { ...area, ...look, x: area.x + 4, y: area.y + 4, "stroke-dasharray": "none", "stroke-width": 1 }, element);
  if (!closed && graph.nodes[index].kind !== "call")
    make("ellipse", { cx: at.x, cy: at.y, rx: at.width / 2, ry: at.height / 2, ...look }, element);
  else make("rect", { ...area, ...look }, element);
  make("rect", { class: "halo", x: area.x - 6, y: area.y - 6, width: at.width + 12, height: at.height + 12, rx: 8 }, element);
  lines.forEach((line, row) => make("text", { x: at.x, y: area.y + 17 + 13 * row, "text-anchor": "middle",
    class: row ? "sub" : "name" }, element, line));
  hover(element, () => describe(id));
  const act = () => {
    $("details").textContent = describe(id);
    if (closed) change(() => visible.toggle(index), id);
  };
  element.addEventListener("click", act);
  element.addEventListener("keydown", (event) => { if (event.key === "Enter") act(); });
}

function curve([first, ...rest]) {
  let d = "M" + first.x + "," + first.y;
  if (rest.length === 1) return d + "L" + rest[0].x + "," + rest[0].y;
  rest.slice(0, -1).forEach((point, index) => {
    const after = rest[index + 1], last = index === rest.length - 2;
    const end = last ? after : { x: (point.x + after.x) / 2, y: (point.y + after.y) / 2 };
    d += ` Q${point.x},${point.y} ${end.x},${end.y}`;
  });
  return d;
}

function hover(element, text) {
  const tip = $("tip");
  element.addEventListener("pointermove", (event) => {
    if (event.buttons) return;
    tip.textContent = text();
    tip.hidden = false;
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
  });
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
}

// --- what the user does ---

// what was clicked stays where it was on the screen
function change(what, id) {
  if (drag.moved) return;
  $("tip").hidden = true;
  const anchor = (found) => { const at = found.getBBox(); return { x: at.x, y: at.y }; };
  const find = () => ["g", "c"].map((kind) => document.querySelector(`[data-id="${kind}${id.slice(1)}"]`)).find(Boolean);
  const before = find();
  const old = before && anchor(before);
  what();
  if (visible.count() > MANY) {
    what();
    $("hits").textContent = "too many boxes for one picture";
    return;
  }
  draw();
  const after = find();
  if (old && after) {
    const now = anchor(after);
    box.x += now.x - old.x;
    box.y += now.y - old.y;
  }
  look();
}

function fit() {
  const { clientWidth: w, clientHeight: h } = $("picture");
  // small graphs are not blown up, tall ones are shown from the top at a size that can be read
  const across = w / (bounds.width + 40), down = h / (bounds.height + 40);
  const scale = Math.max(Math.min(1.15, across, down), Math.min(0.7, across));
  box = { w: w / scale, h: h / scale, x: bounds.width / 2 - w / scale / 2, y: 0 };
  if (bounds.height < box.h) box.y = (bounds.height - box.h) / 2;
  look();
}

function look() { $("picture").setAttribute("viewBox", `${box.x} ${box.y} ${box.w} ${box.h}`); }

function zoom(factor, clientX, clientY) {
  const area = $("picture").getBoundingClientRect();
  const x = box.x + ((clientX - area.left) / area.width) * box.w, y = box.y + ((clientY - area.top) / area.height) * box.h;
  box = { x: x - (x - box.x) * factor, y: y - (y - box.y) * factor, w: box.w * factor, h: box.h * factor };
  look();
}

function zoomMiddle(factor) {
  const area = $("picture").getBoundingClientRect();
  zoom(factor, area.left + area.width / 2, area.top + area.height / 2);
}

function search() {
  const text = $("search").value.trim().toLowerCase();
  current = -1;
  hits = !text ? [] : [...graph.nodes.keys()].filter((index) => {
    const { label, module, source, name, dtype, reason } = graph.nodes[index];
    return [label, module, source, name, dtype, short(dtype), reason].some((field) => field.toLowerCase().includes(text));
  });
  $("hits").textContent = text ? hits.length + " found" + (hits.length ? ", Enter goes to the next" : "") : "";
  mark();
}

function mark() {
  const ids = new Set(hits.map((node) => visible.standsFor(node)));
  for (const element of document.querySelectorAll(".box")) element.classList.toggle("hit", ids.has(element.dataset.id));
}

function next() {
  if (!hits.length) return;
  current = (current + 1) % hits.length;
  const node = hits[current];
  visible.reveal(node);
  if (visible.count() > MANY) {
    visible.openTo(style.depth, MANY);
    visible.reveal(node);
  }
  draw();
  const at = document.querySelector(`[data-id="n${node}"]`).getBBox();
  box.x = at.x + at.width / 2 - box.w / 2;
  box.y = at.y + at.height / 2 - box.h / 2;
  look();
  $("details").textContent = describe("n" + node);
  $("hits").textContent = current + 1 + " of " + hits.length;
}

function choose(index) {
  graph = model.graphs[index];
  seen[index] = seen[index] || new Visible(graph);
  visible = seen[index];
  for (const tab of $("graphs").children) tab.setAttribute("aria-selected", tab.dataset.graph === String(index));
  $("depth").replaceChildren();
  const deepest = Math.max(...graph.groups.map(({ depth, run }) => (run ? 0 : depth))) + 1;
  for (let depth = 1; depth <= Math.max(deepest, style.depth); depth++) addOption($("depth"), depth);
  openTo(style.depth);
  search();
}

function openTo(depth) {
  $("depth").value = visible.openTo(depth, MANY);
  draw();
  fit();
}

// --- the page ---

function addOption(select, value) {
  const option = document.createElement("option");
  option.value = option.textContent = value;
  select.append(option);
}

function cell(row, kind, text) {
  const element = document.createElement(kind);
  element.textContent = text;
  row.append(element);
}

function showTotals() {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  const known = model.totals.some(({ kernels }) => kernels !== null);
  for (const title of ["casts", "asked for", ...(known ? ["left after fusion"] : [])]) cell(head, "th", title);
  for (const { name, casts, cast_bytes: bytes, kernels, kernel_bytes: left } of model.totals) {
    const row = table.insertRow();
    cell(row, "td", name);
    cell(row, "td", casts + ", " + size(bytes));
    if (kernels !== null) cell(row, "td", kernels + ", " + size(left));
  }
  $("totals").append(table);
}

function showLegend() {
  const nodes = model.graphs.flatMap((g) => g.nodes);
  const casts = model.graphs.flatMap((g) => g.edges).flatMap((edge) => edge.casts);
  const dtypes = new Set(nodes.map((node) => node.dtype)), classes = new Set(nodes.map((node) => node.op_class));
  const rows = [];
  for (const [fill, text] of style.heatSamples) rows.push([{ fill, "stroke-width": 1 }, text]);
  for (const [dtype, fill] of isHot ? [] : Object.entries(style.dtypes))
    if (dtypes.has(dtype)) rows.push([{ fill, "stroke-width": 1 }, "computes in " + short(dtype)]);
  if (!isHot) {
    rows.push([{ fill: style.mixed, "stroke-width": 1 }, "a closed module, several dtypes"]);
    rows.push([{ fill: style.plain, "stroke-width": 1 }, "no floating dtype"]);
  }
  for (const [name, [meaning, dashes, thick]] of Object.entries(style.classes))
    if (classes.has(name))
      rows.push([{ fill: "#fff", "stroke-width": thick, "stroke-dasharray": dashes || "none" }, name + ": " + meaning]);
  if (nodes.some((node) => node.was)) rows.push([{ fill: "#fff", "stroke-width": 4, stroke: style.changed }, "changed: earlier \u21d2 now"]);
  const lines = [[{ stroke: style.lower }, "cast to a narrower dtype, with its bytes"], [{ stroke: style.widen }, "cast to a wider dtype"]];
  if (casts.some(({ kernel }) => kernel === false))
    lines.push([{ stroke: "#555", "stroke-width": 1.7, "stroke-dasharray": "6 4" }, "cast that Inductor fuses into another kernel"]);
  if (casts.some((cast) => cast.mark === "removed")) lines.push([{ stroke: "#555", "stroke-dasharray": "2 4" }, "cast removed since the earlier report"]);
  const entry = (shape, attributes, text) => {
    make(shape, attributes, make("svg", { width: 36, height: 19 }, $("legend")));
    cell($("legend"), "span", text);
  };
  for (const [attributes, text] of rows) entry("rect", { x: 3, y: 3, width: 30, height: 13, rx: 2, stroke: "#222", ...attributes }, text);
  for (const [attributes, text] of lines) entry("path", { d: "M2,9.5 H34", "stroke-width": 2.6, ...attributes }, text);
}

function showTabs() {
  model.graphs.forEach((g, index) => {
    const alone = model.graphs.filter(({ phase }) => phase === g.phase).length === 1;
    const tab = document.createElement("button");
    tab.setAttribute("role", "tab");
    tab.dataset.graph = index;
    tab.textContent = (alone ? g.phase : g.label) + (g.graph_break ? " (ends at a graph break)" : "") + (g.fallback ? " (torch.autocast)" : "");
    tab.title = g.graph_break || g.fallback;
    tab.addEventListener("click", () => choose(index));
    $("graphs").append(tab);
  });
}

function addMarkers() {
  const marks = make("defs", {}, null);
  for (const [name, colour] of [["plain", "#999"], ["lower", style.lower], ["widen", style.widen]]) {
    const marker = make("marker", { id: name, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: name === "plain" ? 7 : 9,
      markerHeight: name === "plain" ? 7 : 9, markerUnits: "userSpaceOnUse", orient: "auto" }, marks);
    make("path", { d: "M0,0 L10,5 L0,10 z", fill: colour, stroke: "none" }, marker);
  }
  $("picture").prepend(marks);
}

const drag = { from: null, moved: false };
function listen() {
  $("search").addEventListener("input", search);
  $("search").addEventListener("keydown", (event) => { if (event.key === "Enter") next(); });
  $("depth").addEventListener("change", (event) => openTo(Number(event.target.value)));
  $("fit").addEventListener("click", fit);
  $("in").addEventListener("click", () => zoomMiddle(1 / 1.3));
  $("out").addEventListener("click", () => zoomMiddle(1.3));
  const picture = $("picture");
  picture.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.15 : 1 / 1.15, event.clientX, event.clientY);
  }, { passive: false });
  picture.addEventListener("pointerdown", (event) => {
    drag.from = { x: event.clientX, y: event.clientY, at: { ...box } };
    drag.moved = false;
  });
  addEventListener("pointermove", (event) => {
    if (!drag.from) return;
    const dx = event.clientX - drag.from.x, dy = event.clientY - drag.from.y;
    // a hand that shakes still clicks
    drag.moved = drag.moved || Math.hypot(dx, dy) > 4;
    if (!drag.moved) return;
    picture.classList.add("dragging");
    box.x = drag.from.at.x - (dx / picture.clientWidth) * box.w;
    box.y = drag.from.at.y - (dy / picture.clientHeight) * box.h;
    look();
  });
  addEventListener("pointerup", () => {
    drag.from = null;
    picture.classList.remove("dragging");
  });
  addEventListener("resize", () => {
    box.h = (box.w * picture.clientHeight) / picture.clientWidth;
    look();
  });
}

$("title").textContent = model.title;
$("policy").textContent = "policy: " + model.policy;
$("text").textContent = model.text;
$("diff").textContent = model.diff;
$("difference").hidden = !model.diff;
addMarkers();
showTotals();
showLegend();
showTabs();
listen();
if (model.graphs.length) choose(0);
})();
