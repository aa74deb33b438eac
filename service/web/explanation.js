// What an answer of /v1/explain says, as plain values: tokens as people read them, matrices of weights, pieces of text.
// Knows nothing of the page, of requests or of models.
//
// A matrix is {rows, columns, values}: tokens of the answer, and rows x columns weights in one flat array.

import { characters } from "./dom.js";

const HALF_STEP = 2 ** -24; // between the smallest numbers of 16 bits
const SIGNS = { "▁": "·", " ": "·", "\n": "↵", "\r": "↵", "\t": "⇥" };
const BYTES = byteSigns();

/** The token as it can be read: what stands for a space around a word is a dot, and none is without width. */
export function readable(token) {
  const shown = ofBytes(token.token).replace(/[▁\n\r\t]|^ | $/g, (sign) => SIGNS[sign]);
  return shown === "" ? "∅" : shown;
}

/** Byte-level vocabularies spell a byte by a letter of its own: printable ones by themselves, others from U+0100 on. */
function byteSigns() {
  const plain = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  const signs = new Map();
  let others = 0;
  for (let byte = 0; byte < 256; byte += 1) {
    signs.set(String.fromCharCode(plain(byte) ? byte : 256 + others), byte);
    if (!plain(byte)) others += 1;
  }
  return signs;
}

/** What such letters spell; the piece itself where that is no text: part of a character, or spelled otherwise. */
function ofBytes(piece) {
  const bytes = Array.from(piece, (sign) => BYTES.get(sign));
  if (bytes.includes(undefined)) return piece;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes));
  } catch {
    return piece;
  }
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * HALF_STEP;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Numbers of a base64 text: little-endian, of 16 or 32 bits. */
export function decoded(data, dtype) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const width = dtype === "float16" ? 2 : 4;
  const read = width === 2 ? (at) => half(view.getUint16(at, true)) : (at) => view.getFloat32(at, true);
  return Float32Array.from({ length: bytes.length / width }, (_, index) => read(index * width));
}

const unpacked = new WeakMap(); // entry -> its numbers, so that a look at another head reads nothing again

function numbers(entry) {
  if (!unpacked.has(entry)) {
    const { values } = entry;
    unpacked.set(entry, Array.isArray(values) ? values.flat(3) : decoded(values.data, values.dtype));
  }
  return unpacked.get(entry);
}

/** The attention of this kind ("self", "encoder", "decoder", "cross", ...), or undefined. */
export function attentionOf(explanation, kind) {
  return explanation.attention.find((entry) => entry.kind === kind);
}

/** What one head of one layer looks at; a RangeError if the answer has none of them. */
export function matrixOf(explanation, entry, layer, head) {
  const [, heads, rows, columns] = entry.shape;
  const place = entry.layers.indexOf(layer) * heads + entry.heads.indexOf(head);
  if (!entry.layers.includes(layer) || !entry.heads.includes(head)) {
    throw new RangeError(`The answer has no head ${head} of layer ${layer}.`);
  }
  const size = rows * columns;
  return {
    rows: entry.rows.map((index) => explanation.tokens[index]),
    columns: entry.columns.map((index) => explanation.tokens[index]),
    values: numbers(entry).slice(place * size, (place + 1) * size),
  };
}

/** The mean over the given layers and heads. */
export function meanMatrix(explanation, entry, layers, heads) {
  const all = layers.flatMap((layer) => heads.map((head) => matrixOf(explanation, entry, layer, head)));
  const values = Float64Array.from(all[0].values, (_, cell) => {
    return all.reduce((sum, matrix) => sum + matrix.values[cell], 0) / all.length;
  });
  return { ...all[0], values };
}

/** The weight in row `row` and column `column`. */
export function weightAt(matrix, row, column) {
  return matrix.values[row * matrix.columns.length + column];
}

/** One row's weights. */
export function rowOf(matrix, row) {
  const width = matrix.columns.length;
  return Array.from(matrix.values.slice(row * width, (row + 1) * width));
}

/**
 * A text cut where scores begin and end: [{text, start, end, score}], with score null between them.
 * Offsets count characters as the server does (code points), not the halves that a script's strings are made of.
 */
export function pieces(text, scored) {
  const all = characters(text);
  const found = [];
  let at = 0;
  const add = (start, end, score) => {
    if (end > start) found.push({ text: all.slice(start, end).join(""), start, end, score });
  };
  for (const { start, end, score } of together(scored)) {
    add(at, start, null);
    add(Math.max(start, at), end, score);
    at = Math.max(at, end);
  }
  add(at, all.length, null);
  return found;
}

/** Scores of the same characters (bytes of one sign, each a token) as one, in the order of the text. */
function together(scored) {
  const byPlace = new Map();
  for (const { start, end, score } of scored) {
    const before = byPlace.get(`${start} ${end}`)?.score ?? 0;
    byPlace.set(`${start} ${end}`, { start, end, score: before + score });
  }
  return [...byPlace.values()].sort((one, other) => one.start - other.start || one.end - other.end);
}

/** A number as people compare it: as many digits as tell it apart, a real minus sign. */
export function figure(number, digits = 3) {
  if (number === null || Number.isNaN(number)) return "–";
  const small = Math.abs(number) < 10 ** -digits && number !== 0;
  return (small ? number.toExponential(digits - 1) : number.toFixed(digits)).replaceAll("-", "−");
}

/** A number with its sign in front, the plus too. */
export function signed(number, digits = 3) {
  return (number > 0 ? "+" : "") + figure(number, digits);
}
