// Draws one graph of the model at a time.

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
      height: 14 + 13 * faces.get(id).lines.length + (faces.get(id).mix.length ? 5 : 0) });
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
  const dearest = Math.max(0, ...[...edges.values()].map(({ casts }) => sum([...casts.values()].filter(isReal))));
  for (const { v, w } of layout.edges()) drawEdge(scene, layout.edge(v, w), edges.get(v + ">" + w), labels, dearest);
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

function drawEdge(scene, at, { from, to, casts: found }, labels, dearest) {
  const casts = [...found.values()];
  if (!casts.length) {
    const plain = make("g", { class: "edge", "data-from": from, "data-to": to }, scene);
    make("path", { d: curve(at.points), "marker-end": "url(#plain)" }, plain);
    return;
  }
  const { colour, name, wide } = castLook(casts, dearest), ink = `var(--${colour})`;
  const element = make("g", { class: name, "data-from": from, "data-to": to }, scene);
  const head = wide > 4 ? colour + "-wide" : colour;
  const points = wide > 4 ? shortened(at.points, 14) : at.points;
  make("path", { d: curve(points), style: `stroke:${ink};stroke-width:${wide.toFixed(1)}`, "marker-end": `url(#${head})` }, element);
  const label = make("g", { class: name, "data-from": from, "data-to": to }, null);
  const left = at.x - at.width / 2, top = at.y - at.height / 2;
  make("rect", { x: left, y: top, width: at.width, height: at.height, rx: 4, style: "stroke:" + ink }, label);
  at.lines.forEach((line, row) =>
    make("text", { x: at.x, y: top + 13.5 + 14 * row, "text-anchor": "middle", style: "fill:" + ink }, label, line));
  labels.push(label);
  for (const part of [element, label]) {
    hover(part, () => describeEdge(casts));
    part.addEventListener("click", () => { $("details").textContent = describeEdge(casts); });
  }
}

function drawBox(scene, id, at, { lines, fill, ink, mix: found, border: [, dashes, thick], changed }) {
  const closed = id[0] === "g", index = Number(id.slice(1));
  const element = make("g", { class: "box" + (changed ? " changed" : ""), "data-id": id, tabindex: 0, role: "button",
    "aria-label": lines.join(", ") }, scene);
  const look = { class: "face", style: "fill:" + fill, "stroke-width": thick, "stroke-dasharray": dashes || "none" };
  const area = { x: at.x - at.width / 2, y: at.y - at.height / 2, width: at.width, height: at.height, rx: 4 };
  if (closed) make("rect", { ...area, ...look, x: area.x + 4, y: area.y + 4, "stroke-dasharray": "none", "stroke-width": 1 }, element);
  if (!closed && graph.nodes[index].kind !== "call")
    make("ellipse", { cx: at.x, cy: at.y, rx: at.width / 2, ry: at.height / 2, ...look }, element);
  else make("rect", { ...area, ...look }, element);
  drawMix(element, found, area);
  make("rect", { class: "halo", x: area.x - 6, y: area.y - 6, width: at.width + 12, height: at.height + 12, rx: 8 }, element);
  lines.forEach((line, row) => make("text", { x: at.x, y: area.y + 17 + 13 * row, "text-anchor": "middle",
    class: row ? "sub" : "name", style: "fill:" + ink }, element, line));
  hover(element, () => describe(id));
  const act = () => {
    $("details").textContent = describe(id);
    if (closed) change(() => visible.toggle(index), id);
  };
  element.addEventListener("click", act);
  element.addEventListener("keydown", (event) => { if (event.key === "Enter") act(); });
}

// along the foot of a closed module: its calls by dtype
function drawMix(element, found, { x, y, width: wide, height }) {
  const total = found.reduce((count, [, n]) => count + n, 0);
  let left = x + 2;
  for (const [dtype, n] of found) {
    const part = ((wide - 4) * n) / total;
    make("rect", { x: left, y: y + height - 6, width: part, height: 4, style: "fill:" + colourOf(dtype) }, element);
    left += part;
  }
}

// room for the head of a wide line, which would show on both sides of its tip
function shortened(points, length) {
  const last = points[points.length - 1], before = points[points.length - 2];
  const far = Math.hypot(last.x - before.x, last.y - before.y) || 1, keep = Math.max(0, 1 - length / far);
  return [...points.slice(0, -1), { x: before.x + keep * (last.x - before.x), y: before.y + keep * (last.y - before.y) }];
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

