// The initial texts of the forms and their examples.

export const CHATS = ["Why is the sky blue?", "Name three rivers in Europe.", "Write a haiku about rain."];

export const PROMPTS = ["The history of the city begins in", "Once upon a time, in a small village,", "The most important thing about water is"];

const TEXTS = [
  "I loved every minute of it: warm, funny and beautifully played.",
  "The room was cold, the staff were rude, and nobody answered the phone.",
  "The meeting has been moved to Thursday at nine.",
];

// Texts for models with a certain label.
const BY_LABEL = {
  ham: ["Are we still meeting for lunch tomorrow?", "WINNER! You have been chosen for a free prize. Call now to claim it."],
};

export function textSamples(model) {
  const labels = (model.labels ?? []).map((each) => each.toLowerCase());
  return Object.entries(BY_LABEL).find(([label]) => labels.includes(label))?.[1] ?? TEXTS;
}

const PAIRS = [
  ["A man is playing a guitar on the stage.", "Somebody makes music."],
  ["The children are asleep upstairs.", "The children are playing in the garden."],
];

export function pairSamples() {
  return PAIRS;
}

export const ZERO_SHOT = { labels: ["sport", "politics", "weather"], template: "This example is {}." };

export const PASSAGES = {
  query: "How tall is the Eiffel Tower?",
  passages: [
    "Paris is the capital of France and lies on the Seine.",
    "The Eiffel Tower is 330 metres tall and was built in 1889.",
    "A tower crane lifts heavy loads at building sites.",
  ],
};

export const SENTENCES = [
  "A cat sleeps on the sofa.", "A kitten is napping on the couch.", "The stock market fell today.", "Shares lost value this morning.",
];

export const TAGGED = [
  "Angela Merkel was born in Hamburg and worked in Berlin.",
  "The quick brown fox jumps over the lazy dog.",
];

export const QUESTIONS = [
  {
    question: "What did Nikola Tesla work on?",
    context: "Nikola Tesla was a Serbian-American engineer. He is best known for his work on alternating current, and moved to New York in 1884.",
  },
  {
    question: "Where does the river rise?",
    context: "The Danube is the second-longest river in Europe. It rises in the Black Forest and flows into the Black Sea.",
  },
];

export const MASKED = ["The capital of France is {}.", "She went to the {} to buy some bread.", "The {} is the largest planet of the solar system."];

export const TRANSLATED = ["The device is not available.", "Enter the password of your account.", "The temperature of the room is too high."];

export const CHOICES = {
  text: "The chef put the cake into the oven.",
  choices: ["After an hour she took it out and let it cool.", "The oven sang a song about the sea.", "He parked the car in the garage."],
};

export const STATES = [
  "My card was charged twice for one order, and nobody answers the phone.",
  "The parcel came a day early, and everything in it was fine.",
  "The app closes whenever I open the settings.",
];

// A question of each kind, as the form has it.
export function typedQuestions() {
  return [
    { name: "topic", type: "choice", instructions: "What is the text about?", options: ["payment: bills, cards and refunds", "delivery: parcels and dates", "software: the app and its errors"] },
    { name: "complaint", type: "noul", instructions: "Is the text a complaint?" },
    { name: "urgency", type: "score", instructions: "How urgent is an answer?", options: ["not urgent", "urgent", "very urgent"] },
  ];
}

const MAX_SAMPLE_LABELS = 10;

// Questions to a classifier that knows only its own labels.
export function labelQuestions({ labels }) {
  return [
    { name: "label", type: "choice", instructions: "Which label fits?", options: labels.slice(0, MAX_SAMPLE_LABELS) },
    { name: "is_it", type: "noul", instructions: labels.at(-1) ?? "" },
  ];
}
