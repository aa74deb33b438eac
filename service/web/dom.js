// Elements out of plain data.
//
// Knows nothing of the page.  The one idea: what people and models write gets in as text, never as markup, because
// there is no other way in here; and nothing has a style of its own, which the policy of the page forbids.

const SVG = "http://www.w3.org/2000/svg";
let made = 0;

// An element: `onclick` and the like are listeners, true and false are there or not, strings are attributes.
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A name that nothing else on the page has.
export function unique(kind) {
  made += 1;
  return `${kind}-${made}`;
}

// The same node with a custom property for the stylesheet: how long a bar is, how warm a cell.
export function toned(node, property, value) {
  node.style.setProperty(property, String(value));
  return node;
}

// The API counts characters as Python does, by code points; strings here count otherwise.
export function characters(text) {
  return Array.from(text);
}

export function percent(share) {
  if (share >= 0.9995) return "100 %";
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(share * 100).toFixed(1)} %`;
}

export function number(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  return Number(value.toPrecision(digits)).toLocaleString("en-GB", { maximumSignificantDigits: digits });
}
