// What the user does with the picture.

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
  const scale = Math.max(Math.min(1.15, across, down), Math.min(0.9, across), 0.6);
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
  // names of modules first: a line of source names many
  const rank = ({ module, face: { lines }, name, dtype, details }) =>
    [[module], [...lines, name, dtype], [details]].findIndex((fields) =>
      fields.some((field) => field.toLowerCase().includes(text)));
  const ranks = graph.nodes.map(rank);
  hits = !text ? [] : [...graph.nodes.keys()].filter((index) => ranks[index] >= 0).sort((a, b) => ranks[a] - ranks[b]);
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
    visible.openTo(graph.depth, MANY);
    visible.reveal(node);
  }
  draw();
  centre(document.querySelector(`[data-id="n${node}"]`));
  select("n" + node, describe("n" + node));
  $("hits").textContent = current + 1 + " of " + hits.length;
}

// the graph of a tab, or the tab beside them: both columns
function show(tab) {
  for (const other of $("graphs").children) other.setAttribute("aria-selected", other === tab);
  $("beside").hidden = !("beside" in tab.dataset);
  document.querySelector("#picture").toggleAttribute("hidden", "beside" in tab.dataset);
}

function choose(index) {
  show(document.querySelector(`#graphs [data-graph="${index}"]`));
  graph = model.graphs[index];
  selected = "";
  seen[index] = seen[index] || new Visible(graph);
  visible = seen[index];
  $("depth").replaceChildren();
  const deepest = Math.max(...graph.groups.map(({ depth, run }) => (run ? 0 : depth))) + 1;
  for (let depth = 1; depth <= deepest; depth++) $("depth").add(new Option(depth));
  openTo(graph.depth);
  search();
}

function openTo(depth) {
  $("depth").value = visible.openTo(depth, MANY);
  draw();
  fit();
}

