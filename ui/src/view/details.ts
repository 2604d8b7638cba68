import { apart, bytes, count, duration, rate, ranks } from '../draw/format.ts';
import { css, type Palette } from '../draw/palette.ts';
import type { Arrivals } from '../model/operations.ts';
import type { RankStatistics, Statistics } from '../model/statistics.ts';
import { slowestOf, FAILED, KINDS, NOT_READY, NOT_STARTED, type Store } from '../model/store.ts';
import type { Cell } from '../model/track_events.ts';
import { t } from '../texts.ts';
import { button, h } from './dom.ts';
import type { Actions } from './options.ts';
import { indexOf, rowsOf, type Hit } from './scene.ts';

const SHOWN = 8;
/** With more ranks than this, only those are listed that others waited for most. */
const RANKS_SHOWN = 12;

/** Names of the tensors of a hit, the first few; empty for one without a name. */
export function title(store: Store, hit: Hit): string {
  const k = indexOf(hit);
  const name = store.names[hit.lane.name[k]] ?? '';
  return hit.rows > 1 ? t('%1 + %2 fused', name, hit.rows - 1).trim() : name;
}

/** Describe a row in one sentence, which screen readers speak. */
export function sentence(store: Store, hit: Hit): string {
  const { lane } = hit;
  const k = indexOf(hit);
  const came = store.operations.get(lane.op[k]);
  const parts = [t('rank %1: %2 %3', lane.rank, t(KINDS[lane.kind[k]]), title(store, hit)).trim()];
  if (lane.flags[k] & FAILED) parts.push(t('failed'));
  if (!(lane.flags[k] & NOT_STARTED)) parts.push(t('transfer %1', duration(lane.finished[k] - lane.started[k])));
  parts.push(t('waited %1', duration(lane.flags[k] & NOT_READY ? lane.finished[k] : lane.ready[k])));
  if (came && came.count > 1) parts.push(lastText(store, came));
  const site = siteOf(store, hit);
  if (site) parts.push(site);
  return parts.join(', ');
}

/** Name the rank that came last, if the clocks are exact enough. */
function lastText(store: Store, came: Arrivals): string {
  if (!store.certain(came)) return t('who came last is within the error of the clocks');
  return t('rank %1 came last, %2 after the first', came.lastRank, duration(came.last - came.first));
}

/** A line of code; a button if there is a way to go there. Collectives of hvdlab's own have words in place of a line. */
function siteNode(site: string, { open }: Actions): HTMLElement {
  if (!open || !/(:| line )\d+$/.test(site)) return h('span', { class: 'hvd-site' }, site);
  const link = button(site, t('Go to %1 (O)', site), () => open(site));
  link.className = 'hvd-site hvd-link';
  return link;
}

function siteOf(store: Store, hit: Hit): string {
  return store.sites[hit.lane.name[indexOf(hit)]] ?? '';
}

function nbytes(hit: Hit): number {
  const k = indexOf(hit);
  let sum = 0;
  for (let i = k; i < k + hit.rows && i < hit.lane.n; i++) sum += hit.lane.nbytes[i];
  return sum;
}

function facts(store: Store, hit: Hit): [string, string][] {
  const { lane } = hit;
  const k = indexOf(hit);
  const flags = lane.flags[k];
  const took = lane.finished[k] - lane.started[k];
  const size = nbytes(hit);
  const list: [string, string][] = [[t('size'), bytes(size)]];
  list.push([t('waited for others'), duration(flags & NOT_READY ? lane.finished[k] : lane.ready[k])]);
  if (!(flags & NOT_STARTED)) {
    list.push([t('queue'), duration(lane.started[k] - lane.ready[k])], [t('transfer'), duration(took)]);
    if (size && took > 0) list.push([t('bandwidth'), rate((size / took) * 1e9)]);
  }
  if (flags & FAILED) list.push([t('status'), t('failed')]);
  const came = store.operations.get(lane.op[k]);
  if (came && came.count > 1) {
    const of = came.size && came.count < came.size ? ` ${t('(of %1 recorded)', came.count)}` : '';
    const error = Math.max(store.clockError.get(came.lastRank) ?? 0, ...store.clockError.values());
    const by = duration(came.last - came.first) + (error ? ` ± ${duration(error)}` : '');
    list.push([t('last'), (store.certain(came) ? t('rank %1, by %2', came.lastRank, by) : t('within the error of the clocks: %1', by)) + of]);
  }
  return list;
}

export function tooltip(store: Store, hit: Hit): Node[] {
  const { lane } = hit;
  const k = indexOf(hit);
  const what = hit.part === 'late' ? t('the others wait for this rank') : hit.part === 'wait' ? t('waiting for others') : t(KINDS[lane.kind[k]]);
  const table = h('dl');
  for (const [name, value] of facts(store, hit)) table.append(h('dt', {}, name), h('dd', {}, value));
  const site = siteOf(store, hit);
  return [h('div', { class: 'hvd-tip-name' }, title(store, hit) || t(KINDS[lane.kind[k]])), h('div', { class: 'hvd-faint' }, [t('rank %1', lane.rank), what, site].filter(Boolean).join(' · ')), table];
}

/** The chosen operation, with the arrivals of all ranks. */
export function operationPanel(store: Store, hit: Hit, palette: Palette, actions: Actions): Node[] {
  const { lane } = hit;
  const k = indexOf(hit);
  const op = lane.op[k];
  const came = store.operations.get(op);
  const table = h('dl');
  const site = siteOf(store, hit);
  if (site) table.append(h('dt', {}, t('called at')), h('dd', {}, siteNode(site, actions)));
  for (const [name, value] of facts(store, hit)) table.append(h('dt', {}, name), h('dd', {}, value));
  const heading = h('h4', {}, swatch(palette, lane.kind[k]), ` ${t(KINDS[lane.kind[k]])} `, title(store, hit) && h('code', {}, title(store, hit)), ` ${t('on rank %1', lane.rank)}`);
  const left = h('section', {}, heading, table);
  if (!came || came.count < 2) return [left];
  const certain = store.certain(came);
  const rows: Bar[] = [];
  for (const [rank, index] of rowsOf(store, op)) {
    const late = store.lane(rank).arrival[index] - came.first;
    const error = store.clockError.get(rank);
    const text = (late ? `+${duration(late)}` : t('first')) + (error ? ` ± ${duration(error)}` : '');
    rows.push({ name: t('rank %1', rank), share: late / Math.max(1, came.last - came.first), text, strong: certain && rank === came.lastRank });
  }
  return [left, h('section', {}, h('h4', {}, t('Arrival of each rank')), ...longest(rows))];
}

function swatch(palette: Palette, kind: number): HTMLElement {
  return h('i', { class: 'hvd-swatch', style: `background:${css(palette.kinds[kind] ?? palette.kinds[0])}` });
}

interface Bar {
  name: string;
  share: number;
  text: string;
  strong: boolean;
}

/** Bars of all, or of the longest in the order in which they were, and how many others there are. */
function longest(rows: readonly Bar[]): HTMLElement[] {
  if (rows.length <= RANKS_SHOWN) return [bars(rows)];
  const some = rows.filter(row => row.share > 0).sort((a, b) => b.share - a.share);
  const shown = new Set(some.slice(0, RANKS_SHOWN));
  if (!shown.size) return [];
  return [bars(rows.filter(row => shown.has(row))), h('div', { class: 'hvd-faint' }, t('and %1 more ranks, each for no longer', rows.length - shown.size))];
}

function bars(rows: readonly Bar[]): HTMLElement {
  const table = h('table', { class: 'hvd-bars' });
  for (const row of rows) {
    const width = Math.max(0, Math.min(1, row.share)) * 100;
    table.append(
      h('tr', row.strong ? { class: 'hvd-strong' } : {}, h('th', { scope: 'row' }, row.name), h('td', { class: 'hvd-track' }, h('span', { style: `width:${width.toFixed(1)}%` })), h('td', {}, row.text)),
    );
  }
  return table;
}

/** The figures of a name, in the order of the table's columns, each with an explanation. */
function columnTitles(): [name: string, title: string][] {
  return [
    [t('count'), t('Collectives of this name; one that all ranks take part in counts once')],
    [t('total'), t('Time in these collectives, mean of the ranks')],
    ['p50', t('Half of these collectives took no longer than this')],
    ['p99', t('99 of 100 of these collectives took no longer than this')],
    [t('size'), t('Bytes of the tensors, mean of the ranks')],
    [t('bandwidth'), t('Bytes of the tensors for each second in these collectives')],
    [t('waited'), t('Time in which a rank waited for others, mean of the ranks; of collectives that waited at the same time each counts')],
  ];
}

/** How long others waited for a rank, and to how many of all collectives it came last. */
function heldUpText(one: RankStatistics, operations: number): string {
  return one.timesLast ? `${duration(one.heldUp)} · ${t('last in %1 of %2', count(one.timesLast), count(operations))}` : t('never last');
}

/** Statistics of a stretch of time. */
export function statisticsPanel(found: Statistics, palette: Palette, what: string, actions: Actions, todo: readonly HTMLElement[] = []): Node[] {
  const sites = found.names.some(one => one.site);
  const head = h('tr', {});
  head.append(h('th'), h('th', { scope: 'col' }, t('tensor')), ...(sites ? [h('th', { scope: 'col', class: 'hvd-at' }, t('called at'))] : []));
  for (const [name, title] of columnTitles()) head.append(h('th', { scope: 'col', title }, name));
  const body = h('tbody');
  const shown = found.names.slice(0, SHOWN);
  const names = apart(shown.map(one => one.name));
  for (const [i, one] of shown.entries()) {
    const kind = KINDS.indexOf(one.kind);
    const cells = [count(one.count), duration(one.total), duration(one.p50), duration(one.p99), bytes(one.nbytes), rate(one.bandwidth), duration(one.wait)];
    const row = h('tr', {}, h('td', { title: one.kind }, swatch(palette, kind)), h('th', { scope: 'row', title: `${one.kind} ${one.name}` }, names[i] || one.kind));
    if (sites) row.append(h('td', { class: 'hvd-at' }, one.site && siteNode(one.site, actions)));
    for (const cell of cells) row.append(h('td', {}, cell));
    body.append(row);
  }
  const more = found.names.length - SHOWN;
  const left = h(
    'section',
    { class: 'hvd-names' },
    h('h4', {}, t('%1: %2 collectives in %3', what, count(found.operations), duration(found.to - found.from)), ...todo),
    h('table', {}, h('thead', {}, head), body),
    more > 0 && h('div', { class: 'hvd-faint' }, t('and %1 more names', count(more))),
  );
  const most = Math.max(1, ...found.ranks.map(one => one.heldUp));
  const slowest = slowestOf(found.ranks, found.to - found.from);
  const rows = found.ranks.map(one => ({
    name: t('rank %1', one.rank),
    share: one.heldUp / most,
    text: heldUpText(one, found.operations),
    strong: one === slowest,
  }));
  const heading = slowest ? t('Others waited for rank %1 most', slowest.rank) : found.ranks.some(one => one.heldUp > 0) ? t('No rank stands out') : t('No rank was waited for');
  return rows.length < 2 ? [left] : [left, h('section', {}, h('h4', {}, heading), ...longest(rows))];
}

/** The box beside the pointer. */
export class Tip {
  readonly root = h('div', { class: 'hvd-tip', hidden: '' });
  private shown: Hit | Cell | null = null;

  hide(): void {
    this.root.hidden = true;
    this.shown = null;
  }

  hit(store: Store, hit: Hit): void {
    const before = this.shown;
    if (before && 'row' in before && before.row === hit.row && before.lane === hit.lane && before.part === hit.part) return;
    this.shown = hit;
    this.root.replaceChildren(...tooltip(store, hit));
  }

  cell(cell: Cell, now: number): void {
    if (this.shown === cell) return;
    this.shown = cell;
    const length = duration((cell.end ?? now) - cell.begin);
    const text = [ranks(cell.ranks), cell.end === null ? t('runs for %1', length) : length, !cell.ok && t('failed')].filter(Boolean).join(' · ');
    this.root.replaceChildren(h('div', { class: 'hvd-tip-name' }, t('cell %1', cell.text)), h('div', { class: 'hvd-faint' }, text));
  }

  /** Beside a point of a view of some size; above it if there is no room below. */
  place(x: number, y: number, width: number, height: number): void {
    const { root } = this;
    root.hidden = false;
    const right = x + 16 + root.offsetWidth > width;
    const under = y + 14 + root.offsetHeight > height && y - 10 > root.offsetHeight;
    root.style.transform = `translate(${Math.round(right ? x - root.offsetWidth - 12 : x + 14)}px, ${Math.round(under ? y - root.offsetHeight - 10 : y + 14)}px)`;
  }
}
