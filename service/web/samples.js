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
