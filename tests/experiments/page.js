// Runs the script of a report (standard input) on a table of four rows, and prints their order.
const script = require("fs").readFileSync(0, "utf8");

class Element {
  constructor(text = "", attributes = {}) {
    Object.assign(this, { textContent: text, attributes, handlers: {}, classes: new Set(), dataset: {} });
    this.classList = { toggle: (name, on) => (on ? this.classes.add(name) : this.classes.delete(name)) };
  }
  getAttribute(name) { return this.attributes[name]; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(event, handler) { this.handlers[event] = handler; }
}

const heads = ["optimizer", "error"].map(text => new Element(text, { "aria-sort": "none" }));
const rows = [["SGD", "6.4 ± 1"], ["Adam", "diverged"], ["Path-SGD", "5.4"], ["Muon", "13.0"]];
const body = {
  rows: rows.map(cells => ({ cells: cells.map(text => new Element(text)) })),
  append(...sorted) { this.rows = sorted; },
};
const table = Object.assign(new Element(), { tBodies: [body], tHead: { rows: [{ cells: heads }] } });
global.document = { querySelectorAll: () => [table] };

new Function(script)();
const said = [];
for (let click = 0; click < 3; click++) {
  heads[1].handlers.click();
  said.push([heads[1].getAttribute("aria-sort"), body.rows.map(row => row.cells[0].textContent), table.classes.has("sorted")]);
}
console.log(JSON.stringify(said));
