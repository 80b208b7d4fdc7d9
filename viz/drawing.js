// Draws one graph of the model at a time.

function gatherEdges(ids) {
  const edges = new Map();
  for (const edge of graph.edges) {
    const { tail, head, casts } = edge, from = ids[tail], to = ids[head];
    if (from === to || (visible.folded && edge.repeated)) continue;
    const key = from + ">" + to;
    if (!edges.has(key)) edges.set(key, { from, to, casts: new Map() });
    for (const cast of casts) edges.get(key).casts.set(cast.name + cast.mark, cast);
  }
  return edges;
}

function draw() {
  const ids = visible.boxes(), boxes = [...new Set(ids)];
  const faces = new Map(boxes.map((id) => [id, face(id)]));
  const edges = gatherEdges(ids);
  const layout = new Layout(boxes, faces, edges);
  const scene = $("scene");
  scene.replaceChildren();
  const labels = [];
  for (const group of layout.frames) drawFrame(scene, group, layout.nodes.get("c" + group), labels);
  const dearest = Math.max(0, ...[...edges.values()].map(({ casts }) => sum([...casts.values()].filter(isReal))));
  for (const [key, line] of layout.lines()) drawEdge(scene, line, edges.get(key), labels, dearest);
  for (const id of boxes) drawBox(scene, id, layout.nodes.get(id), faces.get(id));
  // last: no box or line may cover them
  scene.append(...labels);
  bounds = { width: layout.width, height: layout.height };
  mark();
  const inside = graph.nodes.length - boxes.filter((id) => id[0] === "n").length;
  $("hidden").textContent = graph.nodes.length + " nodes in " + boxes.length + " boxes" +
    (inside ? "; " + inside + " nodes are inside closed or folded modules" : "");
}

function drawFrame(scene, group, at, labels) {
  const element = make("g", { class: "cluster", "data-id": "c" + group }, null);
  const left = at.x - at.width / 2, top = at.y - at.height / 2, { label, link, own } = titleOf(group);
  make("rect", { class: "frame", x: left, y: top, width: at.width, height: at.height, rx: 6 }, scene);
  labels.push(element);
  make("text", { x: left + 8, y: top + 15 }, element, label);
  const title = make("rect", { class: "title", x: left, y: top, width: own + 14, height: 20 }, element);
  title.addEventListener("click", () => change(() => visible.toggle(group), "c" + group));
  if (!link) return;
  const split = make("text", { class: "split sub", x: left + own + 20, y: top + 15 }, element, link);
  split.addEventListener("click", () => change(() => {
    if (visible.folded) visible.unfold();
    else visible.folded = true;
  }, "c" + graph.groups[group].first));
}

function drawEdge(scene, { points: all, label: at }, { from, to, casts: found }, labels, dearest) {
  const casts = [...found.values()];
  if (!casts.length) {
    const plain = make("g", { class: "edge", "data-from": from, "data-to": to }, scene);
    make("path", { d: curve(all), "marker-end": "url(#plain)" }, plain);
    return;
  }
  const { colour, name, wide } = castLook(casts, dearest), ink = `var(--${colour})`;
  const element = make("g", { class: name, "data-from": from, "data-to": to }, scene);
  const head = wide > 4 ? colour + "-wide" : colour;
  const points = wide > 4 ? shortened(all, 14) : all;
  make("path", { d: curve(points), style: `stroke:${ink};stroke-width:${wide.toFixed(1)}`, "marker-end": `url(#${head})` }, element);
  const label = make("g", { class: name, "data-from": from, "data-to": to }, null);
  const left = at.x - at.width / 2, top = at.y - at.height / 2;
  make("rect", { x: left, y: top, width: at.width, height: at.height, rx: 4, style: "stroke:" + ink }, label);
  at.lines.forEach((line, row) =>
    make("text", { x: at.x, y: top + 13.5 + 14 * row, "text-anchor": "middle", style: "fill:" + ink }, label, line));
  labels.push(label);
  for (const part of [element, label]) {
    hover(part, from + ">" + to, () => hintEdge(casts));
    part.addEventListener("click", () => select(from + ">" + to, describeEdge(casts)));
  }
}

function drawBox(scene, id, at, { lines, fill, ink, mix: found, op_class: name, changed }) {
  const closed = id[0] === "g", index = Number(id.slice(1)), [dashes, thick] = model.borders[name];
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
  hover(element, id, () => hint(id));
  const act = () => {
    select(id, describe(id));
    if (closed) change(() => visible.toggle(index), id);
  };
  element.addEventListener("click", act);
  element.addEventListener("keydown", (event) => { if (event.key === "Enter") act(); });
}

// along the foot of a closed module: its calls by dtype
function drawMix(element, found, { x, y, width: wide, height }) {
  const total = found.reduce((count, [, n]) => count + n, 0);
  let left = x + 2;
  for (const [fill, n] of found) {
    const part = ((wide - 4) * n) / total;
    make("rect", { x: left, y: y + height - 6, width: part, height: 4, style: "fill:" + fill }, element);
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

// what the panel tells of
function select(id, text) {
  selected = id;
  $("details").textContent = text;
  $("tip").hidden = true;
}

// a hint beside the pointer, but for what the panel tells of
function hover(element, id, text) {
  const tip = $("tip");
  element.addEventListener("pointermove", (event) => {
    if (event.buttons || id === selected) return;
    tip.textContent = text();
    tip.hidden = false;
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
  });
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
}

