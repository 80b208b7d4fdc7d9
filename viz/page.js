// What is around the picture: totals, dearest casts, legend, tabs. It runs at the end, and starts the rest.

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

// one sentence and a bar for each of what is compared: what casts move of all
function showTotals() {
  const [ours] = model.totals;
  if (!ours) return;
  $("sentence").textContent = ours.moved
    ? `Casts move ${size(ours.kernel_bytes)} of ${size(ours.moved)}, ${perCent(ours.kernel_bytes, ours.moved)}.`
    : `${ours.casts} casts in the graph, ${size(ours.cast_bytes)} if none is fused.`;
  $("more").textContent = model.more;
  const most = Math.max(...model.totals.map((total) => total.moved ?? total.cast_bytes), 1);
  for (const { name, casts, cast_bytes: bytes, kernels, kernel_bytes: left, moved } of model.totals) {
    cell($("bars"), "span", name);
    const bar = document.createElement("div");
    bar.className = "bar";
    const parts = moved ? [["casts", left], ["rest", moved - left]] : [["casts", bytes]];
    for (const [part, width] of parts) {
      const piece = document.createElement("div");
      piece.className = part;
      piece.style.width = (100 * width) / most + "%";
      bar.append(piece);
    }
    $("bars").append(bar);
    const number = document.createElement("div");
    number.className = "number";
    number.textContent = moved
      ? `${kernels} cast kernels of ${casts} casts, ${size(left)} of ${size(moved)}`
      : `${casts} casts, ${size(bytes)}`;
    $("bars").append(number);
  }
}

// the casts that move most, equal blocks together; those of all graphs
function showDearest() {
  const found = new Map();
  model.graphs.forEach((g, at) => {
    const blocks = new Visible(g);
    for (const edge of g.edges) {
      const ends = [blocks.drawnFor(edge.tail), blocks.drawnFor(edge.head)];
      for (const cast of edge.casts) {
        if (cast.mark === "removed") continue;
        // one that several calls read is one
        const key = JSON.stringify([at, ends[0], cast.before, cast.after]);
        const row = found.get(key) || { at, ends, cast, bytes: 0, casts: new Set() };
        if (!row.casts.has(cast.name)) row.bytes += isReal(cast) ? cast.bytes : 0;
        row.casts.add(cast.name);
        found.set(key, row);
      }
    }
  });
  const rows = [...found.values()].filter(({ bytes }) => bytes).sort((a, b) => b.bytes - a.bytes).slice(0, 5);
  $("dearest-title").hidden = !rows.length;
  for (const { at, ends, cast, bytes, casts } of rows) {
    const g = model.graphs[at], [tail, head] = ends.map((index) => g.nodes[index]);
    const where = head.module || tail.module || head.label;
    const button = document.createElement("button");
    cell(button, "span", size(bytes) + (casts.size > 1 ? " in " + casts.size + " casts" : "") + " ");
    cell(button, "span", `${cast.before} \u2192 ${cast.after}, ${g.phase}, ${where}: ${tail.label}`);
    button.lastChild.className = "what";
    button.addEventListener("click", () => goTo(at, ends));
    $("dearest").append(button);
  }
}

// opens what is around a cast, and marks it
function goTo(at, ends) {
  choose(at);
  for (const node of ends) visible.reveal(node);
  if (visible.count() > MANY) {
    visible.openTo(style.depth, MANY);
    for (const node of ends) visible.reveal(node);
  }
  draw();
  const [from, to] = ends.map((node) => visible.standsFor(node));
  for (const part of document.querySelectorAll(`[data-from="${from}"][data-to="${to}"]`)) part.classList.add("chosen");
  // the label is drawn last
  centre([...document.querySelectorAll(".chosen")].pop() || document.querySelector(`[data-id="${to}"]`));
  const casts = graph.edges.filter(({ tail, head }) => tail === ends[0] && head === ends[1]).flatMap((edge) => edge.casts);
  select(from + ">" + to, describeEdge(casts));
}

function centre(element) {
  const at = element.getBBox();
  box.x = at.x + at.width / 2 - box.w / 2;
  box.y = at.y + at.height / 2 - box.h / 2;
  look();
}

function showLegend() {
  const nodes = model.graphs.flatMap((g) => g.nodes);
  const casts = model.graphs.flatMap((g) => g.edges).flatMap((edge) => edge.casts);
  const dtypes = new Set(nodes.map((node) => node.dtype)), classes = new Set(nodes.map((node) => node.op_class));
  const rows = [];
  for (const [fill, text] of style.heatSamples) rows.push([{ style: "fill:" + fill, "stroke-width": 1 }, text]);
  for (const dtype of isHot ? [] : style.dtypes)
    if (dtypes.has(dtype)) rows.push([{ style: "fill:" + colourOf(dtype), "stroke-width": 1 }, "computes in " + short(dtype)]);
  if (!isHot) rows.push([{ style: "fill:" + tint(0.5), "stroke-width": 1 }, "a closed module; the redder, the more bytes its casts move. Its foot shows its calls by dtype"]);
  if (!isHot) rows.push([{ style: "fill:var(--plain)", "stroke-width": 1 }, "no floating dtype"]);
  for (const [name, [meaning, dashes, thick]] of Object.entries(style.classes))
    if (classes.has(name))
      rows.push([{ style: "fill:var(--paper)", "stroke-width": thick, "stroke-dasharray": dashes || "none" }, name + ": " + meaning]);
  if (nodes.some((node) => node.was)) rows.push([{ style: "fill:var(--paper);stroke:var(--changed)", "stroke-width": 4 }, "changed: earlier \u21d2 now"]);
  const lines = [[{ style: "stroke:var(--lower)", "stroke-width": 6 }, "cast to a narrower dtype, as wide as its bytes"],
    [{ style: "stroke:var(--widen)", "stroke-width": 6 }, "cast to a wider dtype, likewise"]];
  if (casts.some(({ kernel }) => kernel === false))
    lines.push([{ style: "stroke:var(--faint)", "stroke-width": 1.2, "stroke-dasharray": "6 4", opacity: .6 },
      "cast that Inductor fuses into another kernel: it moves nothing of its own"]);
  if (casts.some((cast) => cast.mark === "removed"))
    lines.push([{ style: "stroke:var(--faint)", "stroke-dasharray": "2 4" }, "cast removed since the earlier report"]);
  const entry = (shape, attributes, text) => {
    make(shape, attributes, make("svg", { width: 36, height: 19 }, $("legend")));
    cell($("legend"), "span", text);
  };
  for (const [attributes, text] of rows) entry("rect", { x: 3, y: 3, width: 30, height: 13, rx: 2, class: "face", ...attributes }, text);
  for (const [attributes, text] of lines) entry("path", { d: "M2,9.5 H34", "stroke-width": 2.6, ...attributes }, text);
}

function showTabs() {
  model.graphs.forEach((g, index) => {
    const alone = model.graphs.filter(({ phase }) => phase === g.phase).length === 1;
    const tab = document.createElement("button");
    tab.setAttribute("role", "tab");
    tab.dataset.graph = index;
    tab.textContent = (alone ? g.phase : g.label) + (g.graph_break ? " (ends at a graph break)" : "") + (g.fallback ? " (not rewritten)" : "");
    tab.title = g.graph_break || g.fallback;
    tab.addEventListener("click", () => choose(index));
    $("graphs").append(tab);
  });
  if (!$("beside").firstElementChild) return;
  const tab = document.createElement("button");
  tab.setAttribute("role", "tab");
  tab.dataset.beside = "";
  tab.textContent = "beside autocast";
  tab.addEventListener("click", () => show(tab));
  $("graphs").append(tab);
}

function addMarkers() {
  const marks = make("defs", {}, null);
  // a wide line ends where its head begins, see shortened()
  for (const [name, colour, size, at] of [["plain", "line", 7, 9], ["lower", "lower", 9, 9], ["widen", "widen", 9, 9],
    ["lower-wide", "lower", 20, 0.5], ["widen-wide", "widen", 20, 0.5]]) {
    const marker = make("marker", { id: name, viewBox: "0 0 10 10", refX: at, refY: 5, markerWidth: size,
      markerHeight: size, markerUnits: "userSpaceOnUse", orient: "auto" }, marks);
    make("path", { d: at > 5 ? "M0,0 L10,5 L0,10 z" : "M0,0 L7,5 L0,10 z", style: `fill:var(--${colour})`, stroke: "none" }, marker);
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
  $("open-report").addEventListener("click", () => $("report").showModal());
  $("close-report").addEventListener("click", () => $("report").close());
  // in a narrow window the picture comes first
  $("key").open = !matchMedia("(max-width: 820px)").matches;
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
showDearest();
