// Keeps the end of a growing element in view. It stops when the user scrolls up, and goes on at the end.

const END_PX = 32; // distance from the end that counts as the end

// `button` is shown while the end is out of view; it leads there. Returns a function to be called after every change.
export function followEnd(scroller, button) {
  let follows = true;
  let last = 0;

  const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < END_PX;

  function update() {
    if (follows) scroller.scrollTop = scroller.scrollHeight;
    button.hidden = isAtEnd();
  }

  // Only scrolling up ends it: while the element grows, the end moves away without any action of the user.
  scroller.addEventListener("scroll", () => {
    if (isAtEnd()) follows = true;
    else if (scroller.scrollTop < last) follows = false;
    last = scroller.scrollTop;
    button.hidden = isAtEnd();
  });
  button.addEventListener("click", () => {
    follows = true;
    update();
  });
  update.fromNowOn = () => {
    follows = true;
    update();
  };
  return update;
}
