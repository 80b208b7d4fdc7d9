// What is visible of a graph with some modules open. What may be folded, amp_fx.viz.graph has worked out.

class Visible {
  constructor(graph) {
    this.graph = graph;
    this.open = new Set([0]);   // groups the user sees into
    this.folded = true;         // one of equal groups is drawn for all
    this.paths = graph.groups.map((_, group) => this.pathOf(group));
  }

  pathOf(group) {
    const found = [];
    for (let g = group; g !== null; g = this.graph.groups[g].group) found.unshift(g);
    return found;
  }

  // the box that stands for a node: "n3" itself, or "g1", the outermost closed group around it
  standsFor(node) {
    const drawn = this.folded ? this.graph.nodes[node].drawn : node;
    const closed = this.paths[this.graph.nodes[drawn].group].find((group) => !this.open.has(group));
    return closed === undefined ? "n" + drawn : "g" + closed;
  }

  boxes() { return this.graph.nodes.map((_, index) => this.standsFor(index)); }

  count() { return new Set(this.boxes()).size; }


  title(group) { return this.folded ? this.graph.groups[group].title : this.graph.groups[group].label; }

  // opens modules down to a depth; a lesser one where that would be too many boxes. Returns the depth.
  openTo(depth, most) {
    this.folded = true;
    for (; depth > 0; depth--) {
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

  // equal groups are drawn each, open where the first is
  unfold() {
    this.folded = false;
    this.graph.groups.forEach(({ first }, group) => { if (this.open.has(first)) this.open.add(group); });
  }

  // opens everything around a node, so that it is a box of its own
  reveal(node) {
    if (this.folded && this.graph.nodes[node].drawn !== node) this.unfold();
    for (const group of this.paths[this.graph.nodes[node].group]) this.open.add(group);
  }
}
