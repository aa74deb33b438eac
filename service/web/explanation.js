// The values of an answer of /v1/explain: readable tokens, matrices of weights, pieces of text.
//
// A matrix is {rows, columns, values}: tokens of the answer, and rows x columns weights in one flat array.

import { characters } from "./dom.js";

const HALF_STEP = 2 ** -24; // distance between the smallest float16 numbers
const VISIBLE_SIGNS = { "▁": "·", " ": "·", "\n": "↵", "\r": "↵", "\t": "⇥" };
const BYTE_LETTERS = byteLetters();

/** The text of a token for display: spaces at its ends are dots, line breaks are arrows, and an empty token is ∅. */
export function displayText(token) {
  const shown = decodeByteLetters(token.token).replace(/[▁\n\r\t]|^ | $/g, (sign) => VISIBLE_SIGNS[sign]);
  return shown === "" ? "∅" : shown;
}

/** The letters of a byte-level vocabulary: a printable byte is its own character, others are U+0100 and following. */
function byteLetters() {
  const isPrintable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  const signs = new Map();
  let others = 0;
  for (let byte = 0; byte < 256; byte += 1) {
    signs.set(String.fromCharCode(isPrintable(byte) ? byte : 256 + others), byte);
    if (!isPrintable(byte)) others += 1;
  }
  return signs;
}

/** The text of a byte-level piece; the piece itself if its bytes are no UTF-8 or it has other letters. */
function decodeByteLetters(piece) {
  const bytes = Array.from(piece, (sign) => BYTE_LETTERS.get(sign));
  if (bytes.includes(undefined)) return piece;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes));
  } catch {
    return piece;
  }
}

function decodeFloat16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * HALF_STEP;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** The numbers of a base64 text: little-endian, float16 or float32. */
export function decodeNumbers(data, dtype) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const width = dtype === "float16" ? 2 : 4;
  const read = width === 2 ? (at) => decodeFloat16(view.getUint16(at, true)) : (at) => view.getFloat32(at, true);
  return Float32Array.from({ length: bytes.length / width }, (_, index) => read(index * width));
}

const decodedEntries = new WeakMap(); // entry -> its numbers; they are decoded once for all heads

function entryValues(entry) {
  if (!decodedEntries.has(entry)) {
    const { values } = entry;
    decodedEntries.set(entry, Array.isArray(values) ? values.flat(3) : decodeNumbers(values.data, values.dtype));
  }
  return decodedEntries.get(entry);
}

/** The attention of this kind ("self", "encoder", "decoder", "cross", ...), or undefined. */
export function findAttention(explanation, kind) {
  return explanation.attention.find((entry) => entry.kind === kind);
}

/** The weights of one head of one layer. Throws a RangeError if the answer does not have them. */
export function headMatrix(explanation, entry, layer, head) {
  const [, heads, rows, columns] = entry.shape;
  const index = entry.layers.indexOf(layer) * heads + entry.heads.indexOf(head);
  if (!entry.layers.includes(layer) || !entry.heads.includes(head)) {
    throw new RangeError(`The answer has no head ${head} of layer ${layer}.`);
  }
  const size = rows * columns;
  return {
    rows: entry.rows.map((index) => explanation.tokens[index]),
    columns: entry.columns.map((index) => explanation.tokens[index]),
    values: entryValues(entry).slice(index * size, (index + 1) * size),
  };
}

/** The mean over the given layers and heads. */
export function meanMatrix(explanation, entry, layers, heads) {
  const matrices = layers.flatMap((layer) => heads.map((head) => headMatrix(explanation, entry, layer, head)));
  const values = Float64Array.from(matrices[0].values, (_, cell) => {
    return matrices.reduce((sum, matrix) => sum + matrix.values[cell], 0) / matrices.length;
  });
  return { ...matrices[0], values };
}

/** The weight in row `row` and column `column`. */
export function weightAt(matrix, row, column) {
  return matrix.values[row * matrix.columns.length + column];
}

/** One row's weights. */
export function rowWeights(matrix, row) {
  const width = matrix.columns.length;
  return Array.from(matrix.values.slice(row * width, (row + 1) * width));
}

/**
 * A text split where scores begin and end: [{text, start, end, score}]; the score is null between them.
 * Offsets count code points, as the server does, not UTF-16 units.
 */
export function splitByScores(text, scores) {
  const all = characters(text);
  const found = [];
  let at = 0;
  const add = (start, end, score) => {
    if (end > start) found.push({ text: all.slice(start, end).join(""), start, end, score });
  };
  for (const { start, end, score } of sumByPlace(scores)) {
    add(at, start, null);
    add(Math.max(start, at), end, score);
    at = Math.max(at, end);
  }
  add(at, all.length, null);
  return found;
}

/** Sums the scores of the same characters: the bytes of one character may be several tokens. In the order of the text. */
function sumByPlace(scores) {
  const byPlace = new Map();
  for (const { start, end, score } of scores) {
    const sum = byPlace.get(`${start} ${end}`)?.score ?? 0;
    byPlace.set(`${start} ${end}`, { start, end, score: sum + score });
  }
  return [...byPlace.values()].sort((one, other) => one.start - other.start || one.end - other.end);
}

/** A number with `digits` decimals, or in scientific notation if it is smaller; with a typographic minus sign. */
export function formatNumber(number, digits = 3) {
  if (number === null || Number.isNaN(number)) return "–";
  const small = Math.abs(number) < 10 ** -digits && number !== 0;
  return (small ? number.toExponential(digits - 1) : number.toFixed(digits)).replaceAll("-", "−");
}

/** A number with its sign, also a plus. */
export function formatSigned(number, digits = 3) {
  return (number > 0 ? "+" : "") + formatNumber(number, digits);
}
