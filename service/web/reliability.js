// The reliability diagram of a calibration: how often answers of a confidence are right, without it and with it.
//
// Input: a map of GET /models/NAME/v1/decisions/calibration. A point is a bin of labelled answers that the map was not
// fitted on. On the diagonal answers are right as often as they are certain. Points before and after differ in their
// shape, so colour is not needed to distinguish them. A table has the same numbers.

import { element, number, percent, svgElement } from "./dom.js";

const SIDE = 240; // of the square from 0 to 1, in units of the viewBox
const LEFT = 44; // of the square, where the labels of the vertical axis are
const TOP = 10;
const WIDTH = LEFT + SIDE + 18;
const HEIGHT = TOP + SIDE + 40;
const TICKS = [0, 0.25, 0.5, 0.75, 1];
const RADIUS = 3.5;
const STEPS = 40; // of the edge of the band
const DEVIATIONS = 1.96; // of a normal distribution, between which 95 % of it are
const KINDS = { noul: "predicate", choice: "choice", score: "score" }; // by the type of an answer of /v1/systemone
const SIDES = { before: "before", after: "after calibration" };

const across = (share) => LEFT + share * SIDE;
const up = (share) => TOP + (1 - share) * SIDE;

// The calibrations of models, by the maps that answers name.
export class Calibrations {
  // `request(path)` returns the JSON of a path.
  constructor(request) {
    this.request = request;
    this.maps = new Map(); // the promise of a model's maps
  }

  // The map that was applied to an answer of the model. The maps are requested again if they do not have it: the model
  // may have been loaded again. Undefined if it is still unknown.
  async find(model, answer) {
    const isApplied = (each) => each.name === answer.calibration && each.kind === KINDS[answer.type];
    const known = (await this.maps.get(model)?.catch(() => []))?.find(isApplied);
    if (known) return known;
    this.maps.set(model, this.request(`/models/${model}/v1/decisions/calibration`).then(({ maps }) => maps));
    return (await this.maps.get(model)).find(isApplied);
  }
}

// `confidence` is that of the answer, which is marked in the diagram.
export function drawReliability(map, confidence) {
  const errors = `calibration error ${number(map.before.ece)} before, ${number(map.after.ece)} after`;
  const summary = element("summary", {}, "Reliability: ", element("span", { class: "given" }, errors));
  const measured = `Measured on ${map.held_out_answers} labelled answers, whose texts had no part in the calibration.`;
  return element("details", { class: "reliability" }, summary, ...content(map, confidence, measured));
}

function content(map, confidence, measured) {
  if (!map.before.bins.length || !map.after.bins.length) {
    return [element("p", { class: "hint" }, `${measured} The file has no bins to draw; polyhead calibrate writes them.`)];
  }
  const chance = `If their confidences were exactly right, the error would be about ${number(chanceError(map.after.bins), 2)} by chance.`;
  return [element("figure", {}, diagram(map, confidence), legend()), element("p", { class: "hint" }, `${measured} ${chance}`), table(map)];
}

// The standard deviation of the share that is right, of `answers` answers that are right with this probability.
function deviation(share, answers) {
  return Math.sqrt((share * (1 - share)) / answers);
}

// The mean error of exactly calibrated answers in these bins: the mean absolute value of a normal distribution.
function chanceError(bins) {
  const total = bins.reduce((sum, { answers }) => sum + answers, 0);
  const gaps = bins.map(({ confidence, answers }) => (answers / total) * deviation(confidence, answers) * Math.sqrt(2 / Math.PI));
  return gaps.reduce((sum, gap) => sum + gap, 0);
}

function diagram(map, confidence) {
  const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "Reliability diagram. The table has its numbers." };
  const [middle, bottom] = [across(0.5), HEIGHT - 4];
  return svgElement("svg", box,
    band(map.held_out_answers / map.after.bins.length),
    ...TICKS.flatMap(gridLines),
    svgElement("line", { class: "ideal", x1: across(0), y1: up(0), x2: across(1), y2: up(1) }),
    svgElement("line", { class: "here", x1: across(confidence), y1: up(0), x2: across(confidence), y2: up(1) }),
    ...Object.keys(SIDES).map((side) => series(side, map[side].bins)),
    svgElement("text", { x: middle, y: bottom, "text-anchor": "middle" }, "confidence"),
    svgElement("text", { x: 12, y: up(0.5), "text-anchor": "middle", transform: `rotate(-90 12 ${up(0.5)})` }, "share that is right"));
}

// Where 95 of 100 points lie if every confidence is right, of bins of `answers` answers.
function band(answers) {
  const shares = Array.from({ length: STEPS + 1 }, (_, step) => step / STEPS);
  const edge = (sign) => shares.map((share) => [share, share + sign * DEVIATIONS * deviation(share, answers)]);
  const points = [...edge(1), ...edge(-1).reverse()].map(([x, y]) => coordinates(across(x), up(Math.max(0, Math.min(1, y)))));
  return svgElement("polygon", { class: "band", points: points.join(" ") });
}

function coordinates(x, y) {
  return `${x.toFixed(2)},${y.toFixed(2)}`;
}

function gridLines(share) {
  const label = String(share);
  return [
    svgElement("line", { class: "grid", x1: across(share), y1: up(0), x2: across(share), y2: up(1) }),
    svgElement("line", { class: "grid", x1: across(0), y1: up(share), x2: across(1), y2: up(share) }),
    svgElement("text", { x: across(share), y: up(0) + 16, "text-anchor": "middle" }, label),
    svgElement("text", { x: LEFT - 6, y: up(share) + 4, "text-anchor": "end" }, label),
  ];
}

function series(side, bins) {
  return svgElement("g", { class: side }, ...bins.map(({ confidence, accuracy }) => point(side, across(confidence), up(accuracy))));
}

// A square or a circle.
function point(side, x, y) {
  if (side === "after") return svgElement("circle", { cx: x.toFixed(2), cy: y.toFixed(2), r: RADIUS });
  const corner = { x: (x - RADIUS).toFixed(2), y: (y - RADIUS).toFixed(2) };
  return svgElement("rect", { ...corner, width: 2 * RADIUS, height: 2 * RADIUS });
}

function legend() {
  const sample = (name, drawn) => element("li", {}, svgElement("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" }, drawn), name);
  const line = (kind) => svgElement("line", { class: kind, x1: 1, y1: 6, x2: 23, y2: 6 });
  return element("figcaption", {}, element("ul", {},
    ...Object.entries(SIDES).map(([side, name]) => sample(name, svgElement("g", { class: side }, point(side, 12, 6)))),
    sample("right as often as certain", line("ideal")),
    sample("95 % of such points by chance", svgElement("rect", { class: "band", x: 1, y: 1, width: 22, height: 10 })),
    sample("this answer", line("here"))));
}

function table(map) {
  const head = element("tr", {}, ...["Confidence", "Right", "Answers"].map((name) => element("th", { scope: "col" }, name)));
  const groups = Object.entries(SIDES).map(([side, name]) => element("tbody", {},
    element("tr", {}, element("th", { scope: "rowgroup", colspan: 3 }, name[0].toUpperCase() + name.slice(1))),
    ...map[side].bins.map(({ confidence, accuracy, answers }) => element("tr", {},
      ...[percent(confidence), percent(accuracy), answers].map((cell) => element("td", {}, cell))))));
  return element("details", {}, element("summary", {}, "As a table"),
    element("table", { class: "plain" }, element("thead", {}, head), ...groups));
}
