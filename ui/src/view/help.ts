import { t } from '../texts.ts';
import { h } from './dom.ts';

const lines = () => [
  [t('W S, + −, wheel'), t('zoom')],
  [t('A D, ← →, drag'), t('move; with Shift, further')],
  [t('Home End'), t('the beginning, the end')],
  [t('F'), t('everything')],
  [t('Space'), t('follow what happens, or stand still')],
  [t('click'), t('one collective on all ranks')],
  [t('↑ ↓'), t('another rank or host')],
  [t('[ ]'), t('its previous and next collective')],
  [t('X, click on a host'), t('collapse or open a host; Shift: all')],
  [t('Shift + drag, M'), t('choose a stretch; choose what is in view')],
  [t('click on a cell'), t('choose the time in which it ran')],
  [t('Z'), t('zoom to what is chosen')],
  [t('O'), t('go to the line of code')],
  [t('G'), t('show or hide the charts')],
  [t('/, Enter'), t('search, next match; Shift: previous')],
  [t('Esc'), t('forget what is chosen')],
];

/** The keys, in a box that is hidden at first. */
export function helpBox(): HTMLElement {
  const list = h('dl', { class: 'hvd-help', hidden: '', role: 'note', 'aria-label': t('Keys') });
  for (const [keys, what] of lines()) list.append(h('dt', {}, keys), h('dd', {}, what));
  return list;
}
