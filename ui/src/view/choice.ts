import { duration, ranks as ranksText } from '../draw/format.ts';
import { search, findNext } from '../model/statistics.ts';
import { NOT_STARTED, type Store } from '../model/store.ts';
import type { Group } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { sentence } from './details.ts';
import { hitTest, indexOf, type Hit } from './hits.ts';
import type { Overlay, Scene } from './scene.ts';

/** What is chosen and pointed at, and how one gets from one to the next. */
export class Choice {
  readonly overlay: Overlay = { hover: null, selected: null, range: null, found: null, focus: null };
  private readonly scene: Scene;
  private readonly store: Store;
  private readonly say: (text: string) => void;

  /** `say` is called with what a screen reader should tell. */
  constructor(scene: Scene, say: (text: string) => void) {
    this.scene = scene;
    this.store = scene.store;
    this.say = say;
  }

  hitAt(x: number, y: number): Hit | null {
    const { scene } = this;
    const lane = x >= scene.gutter ? scene.laneAt(y) : null;
    return lane ? hitTest(this.store, lane, scene.time(x), scene.pixel * 4) : null;
  }

  /** Chooses what is at a point: a host, a cell's time, a lane or a collective. */
  at(x: number, y: number): void {
    const { scene, overlay } = this;
    const heading = scene.headingAt(y);
    if (heading) {
      scene.groups.toggle(heading.group);
      overlay.focus = heading.group;
      return;
    }
    const cell = scene.cellAt(x, y);
    if (cell) {
      this.between(cell.begin, cell.end ?? this.scene.now + 1); // what ends just now counts, too
      this.say(t('cell %1 on %2, %3', cell.text, ranksText(cell.ranks), duration((cell.end ?? this.scene.now) - cell.begin)));
      return;
    }
    overlay.range = null;
    overlay.focus = scene.laneAt(y) ?? overlay.focus;
    this.select(this.hitAt(x, y));
  }

  select(hit: Hit | null): void {
    this.overlay.selected = hit;
    if (!hit) return;
    this.overlay.focus = hit.lane;
    this.say(sentence(this.store, hit));
  }

  /** Chooses a stretch of time. */
  between(from: number, to: number): void {
    this.overlay.selected = null;
    this.overlay.range = [from, to];
  }

  forget(): void {
    const { overlay } = this;
    overlay.selected = overlay.range = null;
  }

  /** The stretch of time that is chosen. */
  get stretch(): [number, number] | null {
    const { selected, range } = this.overlay;
    if (range) return range;
    if (!selected) return null;
    const k = indexOf(selected);
    if (k < 0) return null;
    const { lane } = selected;
    const came = this.store.operations.get(lane.op[k]);
    return [Math.min(lane.arrival[k], came?.first ?? Infinity), lane.arrival[k] + lane.finished[k]];
  }

  zoom(): void {
    const stretch = this.stretch;
    if (!stretch) return;
    const margin = (stretch[1] - stretch[0]) * 0.08;
    this.scene.view.show(stretch[0] - margin, stretch[1] + margin);
  }

  /** The line of code of what is chosen. */
  get site(): string {
    const { selected } = this.overlay;
    const k = selected ? indexOf(selected) : -1;
    return selected && k >= 0 ? (this.store.sites[selected.lane.name[k]] ?? '') : '';
  }

  /** Looks for names; returns how many there are, or -1 if nothing is looked for. */
  search(text: string): number {
    const found = (this.overlay.found = search(this.store, text));
    return found ? new Set([...found.names].map(name => this.store.names[name])).size : -1;
  }

  /** Goes to the next span whose name was searched for. */
  next(back: boolean): void {
    const { selected } = this.overlay;
    const names = this.overlay.found?.names;
    if (!names?.size) return;
    const k = selected ? indexOf(selected) : -1;
    const from = selected && k >= 0 ? selected.lane.arrival[k] + selected.lane.finished[k] : this.scene.view.from;
    const found = findNext(this.store, names, from, back) ?? findNext(this.store, names, back ? Infinity : -Infinity, back);
    if (found) this.reveal(found[0], found[1]);
  }

  private reveal(rank: number, k: number): void {
    const { view, groups } = this.scene;
    const lane = this.store.lane(rank);
    const group = groups.of(lane);
    if (group?.collapsed) groups.toggle(group);
    const from = lane.arrival[k];
    const to = from + lane.finished[k];
    if (from < view.from || to > view.to || to - from < view.length / 400) {
      const length = Math.min(view.length, Math.max((to - from) * 8, 1000));
      view.show((from + to) / 2 - length / 2, (from + to) / 2 + length / 2);
    }
    this.overlay.range = null;
    this.select({ lane, row: lane.dropped + k, rows: 1, part: 'work' });
  }

  /** To the lane or host above or below. */
  stepRow(by: number): void {
    const { groups } = this.scene;
    const rows = groups.all.flatMap(group => [...(groups.several ? [group] : []), ...(groups.several && group.collapsed ? [] : group.lanes)]);
    if (!rows.length) return;
    const at = rows.findIndex(row => row === this.overlay.focus);
    const row = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
    this.overlay.focus = row;
    if ('host' in row) this.say(hostText(row));
    else this.say(t('rank %1: others waited %2 for it', row.rank, duration(row.late.covered(...(this.overlay.range ?? this.scene.view.seen)))));
  }

  /** Collapses or opens the host where the keys are, or all. */
  toggle(all: boolean): void {
    const { groups } = this.scene;
    const { focus } = this.overlay;
    if (!groups.several) return;
    if (all) groups.toggleAll();
    const group = all ? null : focus && ('host' in focus ? focus : groups.of(focus));
    if (!group) return;
    groups.toggle(group);
    this.overlay.focus = group;
    this.say(hostText(group));
  }

  /** To the previous or next collective of the lane where the keys are. */
  step(by: number): void {
    const { focus } = this.overlay;
    const lane = (focus && ('host' in focus ? focus.lanes[0] : focus)) ?? this.store.lanes[0];
    if (!lane?.work.n) return;
    const chosen = this.overlay.selected;
    const k = chosen?.lane === lane ? indexOf(chosen) : -1;
    const time = k >= 0 ? lane.arrival[k] + (lane.flags[k] & NOT_STARTED ? 0 : lane.started[k]) : this.scene.view.to;
    let i = lane.work.at(time, Infinity);
    if (k >= 0) i += by;
    if (i >= 0 && i < lane.work.n) this.reveal(lane.rank, lane.work.row[i] - lane.dropped);
  }
}

function hostText(group: Group): string {
  const name = group.host || t('not known');
  const ranks = ranksText(group.lanes.map(lane => lane.rank));
  return group.collapsed ? t('host %1, %2, collapsed', name, ranks) : t('host %1, %2, open', name, ranks);
}
