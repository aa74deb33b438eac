// What the tab Try shows for a model that has no form of its own there.

import { element } from "./dom.js";

const ELSEWHERE = "This model has no form here.";
const DECIDES = "It answers typed questions about a text: the tab Decide has a form for them.";
const ROUTES = "The page API lists the routes.";

export function mountNoForm(container, { model }) {
  const canDecide = (model.tasks ?? []).includes("decisions");
  container.replaceChildren(element("p", { class: "notice" }, `${ELSEWHERE} ${canDecide ? DECIDES : ROUTES}`));
  return { explainSubject: () => ({ input: "" }) };
}
