import { h } from './dom.ts';

const KEYS = [
  ['W S, + −, wheel', 'zoom'],
  ['A D, ← →, drag', 'move; with Shift, further'],
  ['Home End', 'the beginning, the end'],
  ['F', 'everything'],
  ['Space', 'follow what happens, or stand still'],
  ['click', 'one collective on all ranks'],
  ['↑ ↓', 'another rank or host'],
  ['[ ]', 'its previous and next collective'],
  ['X, click on a host', 'collapse or open a host; Shift: all'],
  ['Shift + drag, M', 'choose a stretch; choose what is in view'],
  ['click on a cell', 'choose the time in which it ran'],
  ['C', 'compare the chosen stretch with the next'],
  ['Z', 'zoom to what is chosen'],
  ['O', 'go to the line of code'],
  ['/, Enter', 'search, next match; Shift: previous'],
  ['Esc', 'forget what is chosen'],
];

/** The keys, in a box that is hidden at first. */
export function helpBox(): HTMLElement {
  const list = h('dl', { class: 'hvd-help', hidden: '', role: 'note', 'aria-label': 'Keys' });
  for (const [keys, what] of KEYS) list.append(h('dt', {}, keys), h('dd', {}, what));
  return list;
}
