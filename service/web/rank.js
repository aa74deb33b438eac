// The form for a cross-encoder: passages in the order of their scores for a question.

import { bars } from "./bars.js";
import { number } from "./dom.js";
import { textArea, answerSection, requestForm, showHint, field, textInput, lines, showSideBySide } from "./form.js";
import { PASSAGES } from "./samples.js";

export function mountRank(container, page) {
  const query = textInput(PASSAGES.query);
  const passages = textArea(PASSAGES.passages.join("\n"), 7);
  const place = answerSection("Passages, best first");
  let best = null;

  const request = () => ({
    path: "/v1/rerank", body: { model: page.model.id, query: query.value, documents: lines(passages.value) },
  });

  async function send({ path, body }, signal) {
    const { results } = await page.request(path, body, signal);
    const scores = results.map((each) => each.relevance_score);
    const [maximum, minimum] = [Math.max(...scores, 1), Math.min(...scores, 0)];
    best = body.documents[results[0].index];
    place.replaceChildren(bars(results.map(({ index, relevance_score: score }, rank) => ({
      name: body.documents[index], share: (score - minimum) / (maximum - minimum), figure: number(score), top: !rank,
    })), "Passages, best first"));
  }

  const form = requestForm(page, {
    fields: [field("Question", query), field("Passages, one per line", passages)], button: "Rank", request, send,
  });
  showHint(place, "The passages appear here, best first.");
  showSideBySide(container, form, place);
  return { explainSubject: () => ({ input: [query.value, best ?? lines(passages.value)[0] ?? ""] }), abort: form.abort };
}
