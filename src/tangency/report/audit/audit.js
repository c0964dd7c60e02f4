// The sections of an audit, and the words that they use.

// Beside the links to decisions there is room for the first two.
const more = (words) => (DATA.numbers ? null : words);

SECTIONS.push(
  { id: DATA.numbers ? "audit" : "overview", words: DATA.numbers ? "Audit" : "Overview", make: auditHero },
  { id: "suspects", words: A.real ? "Suspect targets" : "Suspect labels", make: suspects },
  { id: "margins", words: more(A.real ? "Margins" : "Mixed up"), make: margins },
  { id: "copies", words: more("Copies"), make: copies },
  { id: "unlike", words: more("Outliers"), make: unlike },
  { id: "regions", words: more("Regions"), make: regions },
  { id: "cleaning", words: more("Cleaning"), make: cleaning }
);

WORDS.push(
  [
    "Leave-one-out",
    "What the kernel machine, fitted on all samples but one, says of that one. It is a closed form: nothing is trained " +
      "again.",
  ],
  [
    "Margin",
    A.real
      ? "Less the size of the leave-one-out error, in its standard deviations."
      : "The leave-one-out prediction of the given class less the largest of the others. Below zero the others " +
        "contradict the label.",
  ],
  [
    "Probability of being wrong",
    "How much likelier a margin is among wrong than among right ones, whose distributions are found from all margins.",
  ],
  ["Cosine", "How alike two samples are to the network’s kernel: k(x, z) / √(k(x, x) k(z, z)). 1 is the same."],
  [
    "Left open",
    "The part of k(x, x) that the other training samples do not explain: 0 they tell all, 1 nothing is like it.",
  ]
);
