import { duration, ranks } from '../draw/format.ts';
import type { Store } from '../model/store.ts';
import type { Cell } from '../model/track_events.ts';
import { t } from '../texts.ts';
import { tooltip } from './details.ts';
import { h } from './dom.ts';
import type { Hit } from './hits.ts';

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
