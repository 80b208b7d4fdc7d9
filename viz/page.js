// What is around the picture: dearest casts, tabs, the pointer. It runs at the end, and starts the rest.

// the casts that move most, equal blocks together; those of all graphs
function showDearest() {
  const found = new Map();
  model.graphs.forEach((g, at) => {
    for (const edge of g.edges) {
      const ends = [g.nodes[edge.tail].drawn, g.nodes[edge.head].drawn];
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
    const button = document.createElement("button"), what = document.createElement("span");
    what.className = "what";
    what.textContent = `${cast.before} \u2192 ${cast.after}, ${g.phase}, ${head.module || tail.module || head.face.lines[0]}: ${tail.face.lines[0]}`;
    button.append(size(bytes) + (casts.size > 1 ? " in " + casts.size + " casts" : "") + " ", what);
    button.addEventListener("click", () => goTo(at, ends));
    $("dearest").append(button);
  }
}

// opens what is around a cast, and marks it
function goTo(at, ends) {
  choose(at);
  for (const node of ends) visible.reveal(node);
  if (visible.count() > MANY) {
    visible.openTo(graph.depth, MANY);
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
  for (const tab of $("graphs").children)
    tab.addEventListener("click", () => ("beside" in tab.dataset ? show(tab) : choose(Number(tab.dataset.graph))));
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

addMarkers();
listen();
if (model.graphs.length) choose(0);
showDearest();
