import { apart, change, count, duration, rate } from '../draw/format.ts';
import type { Palette } from '../draw/palette.ts';
import type { Comparison, ComparedName } from '../model/comparison.ts';
import { slowestOf } from '../model/ranks.ts';
import { KINDS } from '../model/store.ts';
import type { NameStatistics, Statistics } from '../model/statistics.ts';
import { columnTitles, heldUpText, siteNode, swatch } from './details.ts';
import { h } from './dom.ts';
import type { Actions } from './options.ts';
import { t } from './texts.ts';

const SHOWN = 8;
/** Changes of less are not coloured. */
const NOTABLE = 0.05;

interface Column {
  title(): string;
  value(of: NameStatistics): number;
  text(value: number): string;
  /** Whether more of it is worse (1) or better (-1), or neither. */
  worse: number;
}

const COLUMNS: Column[] = [
  { title: () => t('count'), value: of => of.count, text: count, worse: 0 },
  { title: () => t('total'), value: of => of.total, text: duration, worse: 1 },
  { title: () => t('p50'), value: of => of.p50, text: duration, worse: 1 },
  { title: () => t('p99'), value: of => of.p99, text: duration, worse: 1 },
  { title: () => t('bandwidth'), value: of => of.bandwidth, text: rate, worse: -1 },
];

/** Two stretches of time side by side. */
export function comparisonPanel(found: Comparison, palette: Palette, actions: Actions, end: HTMLElement): Node[] {
  const head = h('tr');
  const explained = new Map(columnTitles());
  for (const name of ['', t('tensor'), '', ...COLUMNS.map(column => column.title())]) {
    const title = explained.get(name);
    head.append(h('th', { scope: 'col', ...(title && { title }) }, name));
  }
  const table = h('table', { class: 'hvd-compare' }, h('thead', {}, head));
  const shown = found.names.slice(0, SHOWN);
  const names = apart(shown.map(one => one.name));
  shown.forEach((one, i) => table.append(bodyOf(one, names[i], palette, actions)));
  const more = found.names.length - SHOWN;
  const heading = h('h4', {}, 'A ', summary(found.a), ' · B ', summary(found.b), ' ', end);
  return [
    h('section', { class: 'hvd-names hvd-both' }, heading, table, more > 0 && h('div', { class: 'hvd-faint' }, t('and %1 more names, which differ less', count(more)))),
    h('section', {}, h('h4', {}, whoWasLast(found)), rankTable(found)),
  ];
}

function summary(of: Statistics): string {
  return t('%1 collectives in %2', count(of.operations), duration(of.to - of.from));
}

function bodyOf(one: ComparedName, short: string, palette: Palette, actions: Actions): HTMLElement {
  const name = h('th', { scope: 'rowgroup', rowspan: '2', title: `${one.kind} ${one.name}` }, short || one.kind, one.site && h('div', {}, siteNode(one.site, actions)));
  const body = h('tbody');
  for (const side of ['a', 'b'] as const) {
    const of = one[side];
    const row = h('tr');
    if (side === 'a') row.append(h('td', { rowspan: '2', title: one.kind }, swatch(palette, KINDS.indexOf(one.kind))), name);
    row.append(h('td', { class: 'hvd-faint' }, side.toUpperCase()));
    for (const column of COLUMNS) {
      const text = of ? column.text(column.value(of)) : '–';
      row.append(h('td', {}, text, side === 'b' && one.a && one.b ? changeNode(column.value(one.a), column.value(one.b), column.worse) : null));
    }
    body.append(row);
  }
  return body;
}

function changeNode(a: number, b: number, worse: number): Node | null {
  const text = change(a, b);
  if (!text) return null;
  const share = (b - a) / a;
  const tone = Math.abs(share) < NOTABLE || !worse ? 'same' : share * worse > 0 ? 'worse' : 'better';
  return h('span', { class: 'hvd-change', 'data-tone': tone }, text);
}

/** Who the others waited for most in each. */
function whoWasLast(found: Comparison): string {
  const parts = [found.a, found.b].map((of, i) => {
    const slowest = slowestOf(of.ranks, of.to - of.from);
    return `${'AB'[i]} ${slowest ? t('rank %1', slowest.rank) : t('no rank stands out')}`;
  });
  return t('Waited for most: %1', parts.join(', '));
}

function rankTable({ a, b, ranks }: Comparison): HTMLElement {
  const slowest = { a: slowestOf(a.ranks, a.to - a.from), b: slowestOf(b.ranks, b.to - b.from) };
  const most = Math.max(1, ...[...a.ranks, ...b.ranks].map(one => one.heldUp));
  const table = h('table', { class: 'hvd-bars' });
  for (const one of ranks) {
    const body = h('tbody');
    for (const side of ['a', 'b'] as const) {
      const of = one[side];
      const held = of?.heldUp ?? 0;
      const row = h('tr', of && of === slowest[side] ? { class: 'hvd-strong' } : {});
      if (side === 'a') row.append(h('th', { scope: 'rowgroup', rowspan: '2' }, t('rank %1', one.rank)));
      const bar = h('span', { style: `width:${((held / most) * 100).toFixed(1)}%`, 'data-side': side });
      row.append(h('td', { class: 'hvd-faint' }, side.toUpperCase()), h('td', { class: 'hvd-track' }, bar));
      row.append(h('td', {}, of ? heldUpText(of, (side === 'a' ? a : b).operations) : t('never last'), side === 'b' && one.a && of ? changeNode(one.a.heldUp, held, 1) : null));
      body.append(row);
    }
    table.append(body);
  }
  return table;
}
