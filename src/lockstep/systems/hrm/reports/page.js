"use strict";
// The slider of each puzzle paints its answer after another segment than the page shows.
const symbols = JSON.parse(document.getElementById("symbols").textContent);
const tokens = (hex) => hex.match(/../g).map((pair) => parseInt(pair, 16));

for (const puzzle of document.querySelectorAll(".puzzle")) {
  const answers = puzzle.dataset.answers.split(" ").map(tokens);
  const halting = puzzle.dataset.halting.split(" ");
  const label = tokens(puzzle.dataset.label);
  const question = tokens(puzzle.dataset.question);
  const cells = [...puzzle.querySelectorAll(".answer i")];
  const kept = cells.map((cell) => [...cell.classList].filter((name) => "rbg".includes(name)));
  const slider = puzzle.querySelector("input");
  const caption = puzzle.querySelector(".at");
  const paint = () => {
    const at = Number(slider.value);
    const before = at > 1 ? answers[at - 2] : question;
    let mistakes = 0;
    answers[at - 1].forEach((token, cell) => {
      const names = [...kept[cell], "k" + token];
      if (at > 1 && token !== before[cell]) names.push("c");
      if (label[cell] !== 0 && token !== label[cell]) {
        names.push("w");
        mistakes += 1;
      }
      cells[cell].className = names.join(" ");
      cells[cell].textContent = symbols[token];
    });
    caption.textContent =
      `after segment ${at} of ${answers.length}, mistakes: ${mistakes}, halting ${halting[at - 1]}`;
  };
  slider.addEventListener("input", paint);
  puzzle.querySelector(".control").hidden = false;
}

const filter = document.getElementById("filter");
filter.hidden = false;
const box = filter.querySelector("input");
const apply = () => document.body.classList.toggle("only-wrong", box.checked);
box.addEventListener("change", apply);
apply();
