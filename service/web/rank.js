// Passages by how well they answer a question, as a cross-encoder sees it.

import { bars } from "./bars.js";
import { number } from "./dom.js";
import { area, answerPlace, asking, empty, field, line, lines, sides } from "./form.js";
import { PASSAGES } from "./samples.js";

export function mountRank(container, page) {
  const query = line(PASSAGES.query);
  const passages = area(PASSAGES.passages.join("\n"), 7);
  const place = answerPlace("Passages, best first");
  let best = null;

  const request = () => ({
    path: "/v1/rerank", body: { model: page.model.id, query: query.value, documents: lines(passages.value) },
  });

  async function ask({ path, body }, signal) {
    const { results } = await page.request(path, body, signal);
    const scores = results.map((each) => each.relevance_score);
    const [most, least] = [Math.max(...scores, 1), Math.min(...scores, 0)];
    best = body.documents[results[0].index];
    place.replaceChildren(bars(results.map(({ index, relevance_score: score }, rank) => ({
      name: body.documents[index], share: (score - least) / (most - least), figure: number(score), top: !rank,
    })), "Passages, best first"));
  }

  const form = asking(page, {
    fields: [field("Question", query), field("Passages, one a line", passages)], button: "Rank", request, ask,
  });
  empty(place, "The passages appear here, best first.");
  sides(container, form, place);
  return { asked: () => ({ input: [query.value, best ?? lines(passages.value)[0] ?? ""] }), leave: form.leave };
}
