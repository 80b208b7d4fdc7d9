// Where boxes, frames and edges stand. Each open module is laid out by itself, and is one box in the module around it:
// so modules stand below each other as their values flow, however long the lines that pass by them are.

const LINE = 13, TITLE = 26, MARGIN = 12;   // pixels

class Layout {
  // boxes to draw, what they say, and the edges between them
  constructor(boxes, faces, edges) {
    this.faces = faces;
    this.plans = new Map();    // group -> what stands in it, and the lines there
    this.nodes = new Map();    // box or frame -> its middle and size
    this.frames = [];          // groups, outer ones first
    for (const id of boxes) this.enclose(id);
    this.routes = [...edges].map(([key, edge]) => [key, this.route(edge, key)]);
    const { width: w, height: h } = this.measure(0);
    Object.assign(this, { width: w, height: h });
    this.put(0, 0, 0);
  }

  groupsAround(id) {
    const index = id.slice(1);
    return visible.paths[(id[0] === "g" ? graph.groups : graph.nodes)[index].group];
  }

  plan(group) {
    if (!this.plans.has(group)) this.plans.set(group, { inside: new Set(), lines: new Map() });
    return this.plans.get(group);
  }

  enclose(id) {
    const path = this.groupsAround(id);
    path.forEach((group, level) => this.plan(group).inside.add(level + 1 < path.length ? "c" + path[level + 1] : id));
  }

  // An edge from module to module leaves its own at "bottom", and enters the other at "top": [group, line] in order
  route({ from, to, casts }, key) {
    const ours = this.groupsAround(from), theirs = this.groupsAround(to);
    let level = 0;
    while (level + 1 < Math.min(ours.length, theirs.length) && ours[level + 1] === theirs[level + 1]) level++;
    const end = (path, at, id) => (at + 1 < path.length ? "c" + path[at + 1] : id);
    const up = ours.slice(level + 1).map((group, at) => [group, end(ours, level + 1 + at, from), "bottom"]).reverse();
    const down = theirs.slice(level + 1).map((group, at) => [group, "top", end(theirs, level + 1 + at, to)]);
    // direction above bytes: a picture that is not wide is read in a narrow window, too
    const words = castLines([...casts.values()]).flatMap((line) => line.split("  "));
    return [...up, [ours[level], end(ours, level, from), end(theirs, level, to), words], ...down].map(
      ([group, tail, head, lines = []]) => {
        // lines without words that have both ends in common are one
        const name = lines.length ? key : "plain";
        this.plan(group).lines.set(tail + ">" + head + ">" + name, { v: tail, w: head, name, lines });
        return [group, { v: tail, w: head, name }];
      });
  }

  size(id) {
    if (id[0] === "c") return this.measure(Number(id.slice(1)));
    const { lines: [title, ...rest], mix: found } = this.faces.get(id);
    const widest = Math.max(width(title, "12px"), ...rest.map((line) => width(line, "10.5px")));
    const round = id[0] === "n" && graph.nodes[Number(id.slice(1))].kind !== "call";
    return { width: widest + 24 + (round ? 16 : 0), height: 14 + LINE * (1 + rest.length) + (found.length ? 5 : 0) };
  }

  // lays out a module from inside to outside; returns its size with frame and title
  measure(group) {
    const { inside, lines } = this.plan(group), drawn = new dagre.graphlib.Graph({ multigraph: true });
    drawn.setGraph({ rankdir: "TB", nodesep: 20, ranksep: 28, edgesep: 10, marginx: MARGIN, marginy: MARGIN,
      ranker: inside.size > 250 ? "longest-path" : "network-simplex" });
    for (const id of inside) drawn.setNode(id, this.size(id));
    for (const { v, w, name, lines: words } of lines.values()) {
      for (const port of [v, w]) if (!drawn.hasNode(port)) drawn.setNode(port, { width: 0, height: 0 });
      const wide = Math.max(0, ...words.map((line) => width(line, "600 10.5px")));
      const label = { width: wide + 14, height: words.length * 14 + 5, labelpos: "c", lines: words };
      drawn.setEdge(v, w, { weight: 10, ...(words.length ? label : {}) }, name);
    }
    // a value leaves below all that is inside
    if (drawn.hasNode("bottom"))
      for (const id of drawn.sinks()) if (id !== "bottom") drawn.setEdge(id, "bottom", { weight: 1 }, "last");
    dagre.layout(drawn);
    // dagre does not count lines that pass beside all boxes
    const across = drawn.edges().flatMap((line) => drawn.edge(line).points.map(({ x }) => x));
    const from = Math.min(0, ...across.map((x) => x - MARGIN)), to = Math.max(drawn.graph().width, ...across.map((x) => x + MARGIN));
    const wide = group ? Math.max(to - from, titleOf(group).wide) : to - from;
    const first = Math.min(...[...inside].map((id) => drawn.node(id)).map(({ y, height: h }) => y - h / 2));
    const room = group ? Math.max(0, TITLE - first) : 0;
    Object.assign(this.plan(group), { drawn, room, shift: (wide - to - from) / 2 });
    return { width: wide, height: drawn.graph().height + room };
  }

  put(group, left, top) {
    const plan = this.plan(group);
    Object.assign(plan, { left: left + plan.shift, top: top + plan.room });
    for (const id of plan.inside) {
      const { x, y, width: w, height: h } = plan.drawn.node(id);
      const at = { x: plan.left + x, y: plan.top + y, width: w, height: h };
      this.nodes.set(id, at);
      if (id[0] !== "c") continue;
      const inner = Number(id.slice(1));
      this.frames.push(inner);
      this.put(inner, at.x - w / 2, at.y - h / 2);
    }
  }

  // key of an edge -> its points, and the place of its words
  lines() {
    return new Map(this.routes.map(([key, parts]) => {
      const points = [];
      let label = null;
      parts.forEach(([group, line], at) => {
        const { drawn, left, top } = this.plan(group), found = drawn.edge(line);
        const moved = ({ x, y }) => ({ x: left + x, y: top + y });
        // where a line goes on in another module, it does not stop at the frame; at the top it keeps clear of boxes there
        points.push(...found.points.slice(at && line.v !== "top" ? 1 : 0, at + 1 < parts.length ? -1 : undefined).map(moved));
        if (found.lines) label = { ...moved(found), width: found.width, height: found.height, lines: found.lines };
      });
      return [key, { points, label }];
    }));
  }
}

// what the title of a frame says, and how wide it is with the link behind it
function titleOf(group) {
  const label = "\u2212 " + visible.title(group), own = width(label, "600 12px");
  const link = graph.groups[group].times === 1 ? "" : visible.folded ? "show each" : "fold equal blocks";
  return { label, link, own, wide: own + 16 + (link ? width(link, "10.5px") + 14 : 0) };
}
