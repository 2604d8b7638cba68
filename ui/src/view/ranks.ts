import { count, duration, rate } from '../draw/format.ts';
import type { Liveness } from '../model/liveness.ts';
import { endedRow, STOPPED, type Failure, type RankRow } from '../model/store.ts';
import { t } from '../texts.ts';
import { h, FailuresBox, standingText, watchTheme } from './dom.ts';

export type { RankRow };

/** A table of the ranks. */
export class RanksView {
  readonly root: HTMLElement;
  private readonly heading = h('span', { class: 'hvd-status', role: 'status' });
  private readonly body = h('tbody');
  private readonly failures = new FailuresBox();
  private readonly end: () => void;
  private told = '';
  private past = '';
  private ended = false;
  private rows: RankRow[] = [];

  constructor(parent: HTMLElement) {
    const head = h('tr');
    const titles: [name: string, title: string][] = [
      [t('rank'), ''],
      [t('state'), ''],
      [t('where'), t('Host and process')],
      [t('plane'), t('The way on which its data goes to other ranks')],
      [t('last 10 s of work'), t('The 10 s before its last collective ended, as all figures to the right')],
      [t('bandwidth'), t('Bytes of its tensors for each second in collectives')],
      [t('came last'), t('Collectives to which it came last')],
      [t('held others up'), t('Time in which others waited for it; waits that overlap count once')],
      [t('worst'), t('The longest time for which others waited for it')],
    ];
    for (const [name, title] of titles) head.append(h('th', { scope: 'col', ...(title && { title }) }, name));
    const bar = h('div', { class: 'hvd-bar' }, h('strong', {}, t('Ranks')), this.heading);
    this.root = h('div', { class: 'hvd-view hvd-ranks' }, bar, this.failures.root, h('div', { class: 'hvd-scroll' }, h('table', {}, h('thead', {}, head), this.body)));
    parent.append(this.root);
    this.end = watchTheme(this.root, () => undefined);
  }

  update(rows: RankRow[], heading: string, failures: readonly Failure[] = []): void {
    this.failures.update(failures);
    this.told = heading === STOPPED ? t('ended') : heading;
    this.head();
    // The panel says it with each span that comes.
    if (rows === this.rows) return;
    this.rows = rows;
    this.show();
  }

  private show(): void {
    const lines = this.rows.map(row => this.row(this.ended ? endedRow(row) : row));
    while (this.body.children.length > lines.length) this.body.children[lines.length].remove();
    for (const [i, old] of [...this.body.children].entries()) renew(old, lines[i]);
    this.body.append(...lines.slice(this.body.children.length));
  }

  /** The kernel speaks, or does not any more: then the table is of the past. */
  stand(liveness: Liveness): void {
    this.past = standingText(liveness);
    this.head();
    const ended = liveness.standing === 'ended';
    if (ended === this.ended) return;
    this.ended = ended;
    this.show();
  }

  private head(): void {
    this.heading.textContent = this.past || this.told;
    this.root.dataset.past = String(!!this.past);
  }

  private row(row: RankRow): HTMLElement {
    const running = row.cell && row.state === 'running' ? t('running %1', row.cell) : t(row.state);
    const state = h('span', { class: 'hvd-state', 'data-state': row.paused ? 'paused' : row.state }, running);
    if (row.reason) state.title = row.reason;
    const shares = h('span', { class: 'hvd-shares', title: t('%1 in collectives, %2 waiting for others', percent(row.work), percent(row.wait)) });
    shares.append(h('span', { class: 'hvd-work', style: `width:${percent(row.work)}` }), h('span', { class: 'hvd-wait', style: `width:${percent(row.wait)}` }));
    return h(
      'tr',
      row.slowest ? { class: 'hvd-strong' } : {},
      h('th', { scope: 'row' }, String(row.rank)),
      h('td', {}, state, row.paused && h('strong', { class: 'hvd-paused' }, t(row.paused)), row.reason && h('div', { class: 'hvd-faint' }, row.reason)),
      h('td', {}, row.host ? `${row.host} · ${row.pid}` : ''),
      h('td', {}, row.plane),
      h('td', {}, shares, row.spans > 0 && h('span', { class: 'hvd-faint' }, ` ${t('%1 waits', percent(row.wait))}`)),
      h('td', { class: 'hvd-number' }, row.bandwidth ? rate(row.bandwidth) : ''),
      h('td', { class: 'hvd-number' }, row.spans ? `${count(row.timesLast)}×` : ''),
      h('td', { class: 'hvd-number' }, row.spans ? duration(row.heldUp) : ''),
      h('td', { class: 'hvd-number' }, row.worst ? duration(row.worst) : ''),
    );
  }

  dispose(): void {
    this.end();
    this.root.remove();
  }
}

/** Bring a row of the table up to date. Cells that stay as they are keep the text that the user has selected in them. */
function renew(old: Element, line: HTMLElement): void {
  old.className = line.className;
  for (const [i, cell] of [...line.children].entries()) if (!old.children[i].isEqualNode(cell)) old.children[i].replaceWith(cell);
}

function percent(share: number): string {
  return `${Math.round(Math.max(0, Math.min(1, share)) * 100)}%`;
}
