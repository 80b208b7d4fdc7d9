// What is visible of a graph with some modules open. At first it is what amp_fx.viz.view works out.

class Visible {
  constructor(graph) {
    this.graph = graph;
    this.open = new Set([0]);    // groups the user sees into
    this.unfolded = new Set();   // folds drawn one by one
    this.places = new Map();     // group -> leaf -> its position in the group
    this.paths = graph.groups.map((_, group) => this.pathOf(group));
    this.members = new Map();    // fold -> its groups
    graph.groups.forEach(({ fold }, group) => {
      if (fold !== null) this.members.set(fold, [...(this.members.get(fold) || []), group]);
    });
    this.inside = this.countCasts();
  }

  pathOf(group) {
    const found = [];
    for (let g = group; g !== null; g = this.graph.groups[g].parent) found.unshift(g);
    return found;
  }

  // group -> bytes of each cast that has both its ends in the group
  countCasts() {
    const inside = this.graph.groups.map(() => new Map());
    for (const { tail, head, casts } of this.graph.edges) {
      if (!casts.length) continue;
      const around = new Set(this.paths[this.graph.nodes[tail].group]);
      for (const group of this.paths[this.graph.nodes[head].group])
        if (around.has(group)) for (const cast of casts) inside[group].set(cast.name, cast);
    }
    return inside.map((casts) => [...casts.values()].filter((cast) => cast.mark !== "removed"));
  }

  place(group, leaf) {
    if (!this.places.has(group))
      this.places.set(group, new Map(this.graph.groups[group].leaves.map((node, index) => [node, index])));
    return this.places.get(group).get(leaf);
  }

  isFolded(group) {
    const { fold } = this.graph.groups[group];
    return fold !== null && fold !== group && !this.unfolded.has(fold);
  }

  // the box that stands for a node: "n3" itself, or "g1", the outermost closed group around it
  standsFor(node) {
    for (;;) {
      let moved = false;
      for (const group of this.paths[this.graph.nodes[node].group]) {
        if (this.isFolded(group)) {
          // drawn as its place in the first of the equal groups
          const { fold } = this.graph.groups[group];
          node = this.graph.groups[fold].leaves[this.place(group, node)];
          moved = true;
          break;
        }
        if (!this.open.has(group)) return "g" + group;
      }
      if (!moved) return "n" + node;
    }
  }

  // the node that is drawn for a node with everything open: its place in the first of equal groups
  drawnFor(node) {
    for (let moved = true; moved;) {
      moved = false;
      for (const group of this.paths[this.graph.nodes[node].group]) {
        const { fold } = this.graph.groups[group];
        if (fold === null || fold === group) continue;
        node = this.graph.groups[fold].leaves[this.place(group, node)];
        moved = true;
        break;
      }
    }
    return node;
  }

  // true where the drawn one of several equal groups tells enough: inside another of them the edge is drawn
  // already; from one to another it would lead back, and is drawn only for its casts
  isRepeated({ tail, head, casts }) {
    const ours = this.paths[this.graph.nodes[tail].group], theirs = this.paths[this.graph.nodes[head].group];
    for (let level = 0; level < Math.min(ours.length, theirs.length); level++) {
      const { fold } = this.graph.groups[ours[level]];
      if (fold === null || this.unfolded.has(fold)) continue;
      if (ours[level] === theirs[level] && ours[level] !== fold) return true;
      if (ours[level] !== theirs[level] && fold === this.graph.groups[theirs[level]].fold) return !casts.length;
    }
    return false;
  }

  boxes() { return this.graph.nodes.map((_, index) => this.standsFor(index)); }

  count() { return new Set(this.boxes()).size; }

  times(group) {
    const { fold, times } = this.graph.groups[group];
    return fold === null || this.unfolded.has(fold) ? 1 : times;
  }

  title(group) {
    const times = this.times(group);
    const { title, label } = this.graph.groups[group];
    return times > 1 ? title + " \u00d7" + times : label;
  }

  // opens modules down to a depth; a lesser one where that would be too many boxes. Returns the depth.
  openTo(depth, most) {
    for (; depth > 0; depth--) {
      this.unfolded.clear();
      this.open = new Set([0]);
      this.graph.groups.forEach((group, index) => {
        if (group.depth < depth && !group.run) this.open.add(index);
      });
      if (this.count() <= most) break;
    }
    return depth;
  }

  toggle(group) {
    if (!this.open.delete(group)) this.open.add(group);
  }

  unfold(fold) {
    this.unfolded.add(fold);
    if (this.open.has(fold)) for (const group of this.members.get(fold)) this.open.add(group);
  }

  // opens everything around a node, so that it is a box of its own
  reveal(node) {
    for (const group of this.paths[this.graph.nodes[node].group]) {
      if (this.isFolded(group)) this.unfold(this.graph.groups[group].fold);
      this.open.add(group);
    }
  }
}
