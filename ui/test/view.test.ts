import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Overview, addCoverage } from '../src/model/overview.ts';
import { statistics } from '../src/model/statistics.ts';
import { ROW_BYTES, Store, readRows, type RankRow, type Mark } from '../src/model/store.ts';
import { extentOf, TrackEvents } from '../src/model/track_events.ts';
import { Track } from '../src/model/tracks.ts';
import { Groups, Viewport } from '../src/model/viewport.ts';
import { Arrangement } from '../src/view/scene.ts';

/** Rounds in which `ranks` ranks come one `step` after the other, wait for the last and are busy for `busy`. */
function rounds(store: Store, first: number, number: number, ranks: number, step: number, busy: number, name = 1): void {
  const buffer = new ArrayBuffer(number * ranks * ROW_BYTES);
  const columns = readRows(buffer, number * ranks);
  for (let i = 0; i < number * ranks; i++) {
    const [round, rank] = [first + Math.floor(i / ranks), i % ranks];
    columns.rank[i] = rank;
    columns.op[i] = round + 1;
    columns.size[i] = ranks;
    columns.arrival[i] = round * 1000 + rank * step;
    columns.ready[i] = columns.started[i] = (ranks - 1 - rank) * step;
    columns.finished[i] = columns.started[i] + busy;
    columns.name[i] = name;
    columns.nbytes[i] = 100;
  }
  store.append(columns);
}

function onHosts(store: Store, ...hosts: string[]): void {
  store.ranks = hosts.map((host, rank) => ({ rank, host }) as RankRow);
}

test('lanes are grouped by host; who left stays where it was', () => {
  const store = new Store();
  const groups = new Groups();
  rounds(store, 0, 1, 4, 10, 100);
  groups.update(store);
  assert.equal(groups.several, false);
  onHosts(store, 'a', 'b', 'a', 'b');
  groups.update(store);
  assert.deepEqual(groups.all.map(group => [group.host, group.lanes.map(lane => lane.rank)]), [['a', [0, 2]], ['b', [1, 3]]]);
  groups.toggle(groups.all[1]);
  const { version } = groups;
  onHosts(store, 'a', '', 'a', 'b');
  groups.update(store);
  assert.deepEqual([groups.version, groups.all[1].lanes.length, groups.all[1].collapsed], [version, 2, true]);
  onHosts(store, 'a', 'b', 'b', 'b');
  groups.update(store);
  assert.deepEqual(groups.all.map(group => group.lanes.length), [1, 3]);
  assert.ok(groups.version > version && groups.all[1].collapsed);
});

test('lanes and hosts lie below each other without overlap, whatever is collapsed', () => {
  const store = new Store();
  rounds(store, 0, 1, 12, 10, 100);
  onHosts(store, ...Array.from({ length: 12 }, (_, rank) => `node-${Math.floor(rank / 4)}`));
  const groups = new Groups();
  groups.update(store);
  const before = new Arrangement(groups, 400, 2, 36);
  groups.toggle(groups.all[1]);
  const arrangement = new Arrangement(groups, 400, 2, 36);
  assert.ok(arrangement.pitch > before.pitch, 'the others get the room');
  const { strips, headings, rows } = arrangement;
  assert.deepEqual([strips.length, headings.length], [12, 3]);
  strips.forEach((strip, i) => {
    const next = strips[i + 1]?.row ?? rows;
    assert.ok(strip.rows > 0 && strip.row + strip.rows <= next, `${i}`);
  });
  assert.deepEqual(strips.map(strip => strip.small), Array.from({ length: 12 }, (_, i) => i >= 4 && i < 8));
  for (const { lane, y, height } of strips) assert.equal(arrangement.laneAt(y + height / 2), lane);
  for (const { group, y, height } of headings) {
    assert.equal(arrangement.headingAt(y + height / 2)?.group, group);
    assert.equal(arrangement.laneAt(y + height / 2), null);
  }
});

test('the same cell on many ranks is one; the same number a second later is another', () => {
  const store = new Store();
  const marks: Mark[] = [];
  const cell = (rank: number, begin: number, end: number | null, ok = true) => marks.push({ kind: 'cell', rank, begin, end, text: '[3]', ok });
  cell(1, 20, 500);
  cell(0, 10, 400, false);
  cell(0, 5e9, null);
  marks.push({ kind: 'left', rank: 1, begin: 900, end: 900, text: 'rank 1 died', ok: false }, { kind: 'joined', rank: 1, begin: 1200, end: 1200, text: 'rank 1 joined', ok: true });
  marks.push({ kind: 'left', rank: 0, begin: 2000, end: 2000, text: 'rank 0 left', ok: false });
  marks.forEach((mark, i) => store.marks.set(i, mark));
  store.version++;
  const events = new TrackEvents();
  events.update(store);
  assert.deepEqual(events.cells, [
    { text: '[3]', begin: 10, end: 500, ok: false, ranks: [0, 1] },
    { text: '[3]', begin: 5e9, end: null, ok: true, ranks: [0] },
  ]);
  assert.equal(events.cellAt(450, 0, 6e9)?.begin, 10);
  assert.equal(events.cellAt(501, 0, 6e9), null);
  assert.equal(events.cellAt(5.5e9, 0, 6e9)?.begin, 5e9);
  assert.deepEqual([...events.absent], [[1, [[900, 1200]]], [0, [[2000, Infinity]]]]);
});

test('a death that the others survive does not fail a cell, and ranks that wait are drawn in their lanes', () => {
  const store = new Store();
  const cell = (rank: number, begin: number, end: number | null, ok: boolean, text: string): Mark => ({ kind: 'cell', rank, begin, end, text, ok });
  const marks: Mark[] = [
    cell(0, 10, 900, true, '[3]'),
    cell(1, 10, 400, false, '[3]'),
    cell(0, 1000, null, true, '[4]'),
    cell(1, 1000, 1500, false, '[4]'),
    cell(0, 2000, 2500, false, '[5]'),
    { kind: 'left', rank: 1, begin: 400, end: 400, text: 'rank 1 died', ok: false },
    { kind: 'left', rank: 1, begin: 1500, end: 1500, text: 'rank 1 died', ok: false },
    { kind: 'left', rank: 0, begin: 2500, end: 2500, text: 'rank 0 died', ok: false },
    { kind: 'waiting', rank: 1, begin: 950, end: 980, text: 'rank 1 waits to be let in', ok: true },
    { kind: 'formed', rank: 0, begin: 980, end: 980, text: 'ranks 0,1 from now on', ok: true },
  ];
  marks.forEach((mark, i) => store.marks.set(i, mark));
  store.version++;
  const events = new TrackEvents();
  events.update(store);
  assert.deepEqual(events.cells.map(one => [one.text, one.ok]), [['[3]', true], ['[4]', true], ['[5]', false]]);
  assert.deepEqual(events.paused.get(1)?.map(mark => mark.kind), ['waiting']);
  assert.deepEqual(events.moments.map(mark => mark.kind), ['left', 'formed', 'left', 'left']);
});

test('a timeline shows rows, cells, and what happened right after them', () => {
  const mark = (kind: Mark['kind'], begin: number, end: number | null): Mark => ({ kind, rank: 0, begin, end, text: `${begin}`, ok: true });
  const extent = (store: Store, ...marks: Mark[]) => {
    marks.forEach((one, i) => store.marks.set(i, one));
    store.version++;
    const events = new TrackEvents();
    events.update(store);
    return extentOf(store, events, 5000);
  };
  assert.equal(extent(new Store(), mark('joined', 5, 5)), null, 'nothing has happened yet');
  const starts = new Store();
  assert.deepEqual(extent(starts, mark('cell', 1e9, null)), [1e9, 1.1e9], 'a cell that runs, before its first collective');
  starts.series.end = 4e9;
  assert.deepEqual(extent(starts, mark('cell', 1e9, null)), [1e9, 4e9]);
  const store = new Store();
  rounds(store, 0, 2, 2, 10, 100);
  assert.deepEqual(extent(store), [0, 1110]);
  assert.deepEqual(extent(store, mark('cell', 0, null)), [0, 1110], 'of this cell there are rows');
  assert.deepEqual(extent(store, mark('cell', 0, 1500), mark('left', 4000, 4000), mark('joined', 90_000, 90_000)), [0, 4000], 'a repair of idle ranks pushes nothing away');
});

test('behind the end of what stands still there is room for the marks of the end', () => {
  const view = new Viewport();
  view.span = 970;
  view.data(0, 5000);
  assert.deepEqual([view.from, view.to], [4030, 5000]);
  view.room = 0.03;
  for (let i = 0; i < 3; i++) view.data(0, view.extent[1]);
  assert.deepEqual([view.from, Math.round(view.to)], [4030, 5030], 'and it does not grow');
  view.zoom(0.5);
  assert.equal(Math.round(view.to - view.from), 500);
  assert.equal(Math.round((view.to - 5000) / 5), 3);
  view.fit();
  assert.ok(view.from < 0 && Math.abs((view.to - 5000) / 5000 - 0.031) < 0.001);
  view.toEnd();
  assert.ok(view.to > 5000);
});

test('the overview says how all time was spent, made in parts', () => {
  const store = new Store();
  rounds(store, 0, 3000, 16, 20, 300);
  const overview = new Overview();
  let parts = 1;
  while (!overview.step(store, 100, 0)) parts++;
  assert.ok(parts > 1, 'it takes more than one part');
  const sum = (column: Float32Array) => column.reduce((a, b) => a + b, 0) / column.length;
  const all = store.end - store.begin;
  const mean = (of: 'work' | 'wait') => store.lanes.reduce((total, lane) => total + lane[of].covered(store.begin, store.end), 0) / store.lanes.length / all;
  assert.ok(Math.abs(sum(overview.work) - mean('work')) < 0.02, `${sum(overview.work)} ${mean('work')}`);
  assert.ok(Math.abs(sum(overview.wait) - mean('wait')) < 0.02);
  assert.ok(Math.abs(sum(overview.late) - store.lanes[15].late.covered(store.begin, store.end) / all) < 0.02);
  assert.equal(overview.behind(store, 100), false);
  rounds(store, 3000, 10, 16, 20, 300);
  assert.equal(overview.behind(store, 100), true);
  assert.equal(overview.step(store, 100, 1), false, 'not more often than it can be seen');
});

test('few intervals are summed up exactly', () => {
  const track = new Track();
  track.push(5, 12, 0, 0);
  track.push(12, 38, 0, 1);
  track.push(90, 200, 0, 2);
  const sums = new Float32Array(10);
  addCoverage(track, 0, 10, sums);
  assert.deepEqual(Array.from(sums, v => Math.round(v * 100) / 100), [0.5, 1, 1, 0.8, 0, 0, 0, 0, 0, 1]);
});

test('who came before a stretch in which it finished holds nobody up in it', () => {
  const store = new Store();
  rounds(store, 0, 2, 2, 10, 100);
  assert.deepEqual(statistics(store, 50, 150).ranks.map(one => [one.timesLast, one.heldUp]), [[0, 0], [1, 0]]);
  assert.deepEqual(statistics(store, 5, 150).ranks.map(one => [one.timesLast, one.heldUp]), [[0, 0], [1, 5]]);
});
