// Functions that build elements.
//
// Texts of users and models are inserted as text nodes, never as markup. No element has a style attribute, which the
// content security policy of the page forbids.

const SVG = "http://www.w3.org/2000/svg";
let idCount = 0;

// An element. A function is a listener (`onclick`), true and false set or omit an attribute, strings are attributes.
export function element(name, attributes = {}, ...children) {
  return fillNode(document.createElement(name), attributes, children);
}

export function svgElement(name, attributes = {}, ...children) {
  return fillNode(document.createElementNS(SVG, name), attributes, children);
}

function fillNode(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A part of an address as text; as it is if its escapes are not valid, which decodeURIComponent throws at.
export function decodePart(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// An id that no other element of the page has.
export function uniqueId(kind) {
  idCount += 1;
  return `${kind}-${idCount}`;
}

// The same node with a custom property for the style sheet, such as the length of a bar.
export function withProperty(node, property, value) {
  node.style.setProperty(property, String(value));
  return node;
}

// The characters of a text. The API counts code points; JavaScript counts UTF-16 units.
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

// Copies a text, and returns whether the browser permits it: without HTTPS it gives pages no clipboard.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
