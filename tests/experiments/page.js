// Runs the script of a report (standard input) on a table of four rows and two switches, and prints what becomes of them.
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
const boxes = ["0", "1"].map(number => Object.assign(new Element(), { checked: true, dataset: { switch: number } }));
const curves = ["0", "1", "0", "1"].map(number => Object.assign(new Element(), { number }));
const none = Object.assign(new Element(), { dataset: { all: "" } });
const card = new Element();
card.querySelectorAll = selector =>
  selector.startsWith("input") ? boxes
    : selector.startsWith("button") ? [none]
      : curves.filter(curve => selector.includes(`"${curve.number}"`));
global.document = { querySelectorAll: selector => (selector === "table.sortable" ? [table] : [card]) };

new Function(script)();
const said = [];
for (let click = 0; click < 3; click++) {
  heads[1].handlers.click();
  said.push([heads[1].getAttribute("aria-sort"), body.rows.map(row => row.cells[0].textContent), table.classes.has("sorted")]);
}
boxes[1].checked = false;
card.handlers.change();
said.push(curves.map(curve => curve.classes.has("off")));
none.handlers.click();
said.push(curves.map(curve => curve.classes.has("off")));
console.log(JSON.stringify(said));
