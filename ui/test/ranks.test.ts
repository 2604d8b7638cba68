import assert from 'node:assert/strict';
import { test } from 'node:test';
import { drawLabel, type Surface } from '../src/draw/lanes.ts';
import { paletteFor } from '../src/draw/palette.ts';
import { statistics } from '../src/model/statistics.ts';
import { endedRow, slowestOf, ROW_BYTES, Store, readRows, type RankRow } from '../src/model/store.ts';

/** Collectives, one a millisecond, to which each rank comes as many ns late as `late` says. */
function rounds(store: Store, number: number, late: (round: number, rank: number) => number, ranks = 3): void {
  const columns = readRows(new ArrayBuffer(number * ranks * ROW_BYTES), number * ranks);
  for (let i = 0; i < number * ranks; i++) {
    const [round, rank] = [Math.floor(i / ranks), i % ranks];
    const last = Math.max(...Array.from({ length: ranks }, (_, other) => late(round, other)));
    columns.rank[i] = rank;
    columns.op[i] = round + 1;
    columns.size[i] = ranks;
    columns.arrival[i] = round * 1e6 + late(round, rank);
    columns.ready[i] = columns.started[i] = last - late(round, rank);
    columns.finished[i] = columns.started[i] + 1000;
  }
  store.append(columns);
}

const held = (...heldUp: number[]) => heldUp.map((one, rank) => ({ rank, heldUp: one }));

test('a rank stands out if others waited for it for a twentieth of the time and twice as long as for any other', () => {
  assert.equal(slowestOf(held(10, 60, 20), 1000)?.rank, 1);
  assert.equal(slowestOf(held(10, 49, 20), 1000), null, 'too short');
  assert.equal(slowestOf(held(94, 122), 1000), null, 'too near to the next');
  assert.equal(slowestOf(held(0, 0), 1000), null);
  assert.equal(slowestOf(held(0, 0), 0), null);
  assert.equal(slowestOf([], 1000), null);
});

test('no rank runs when its kernel has ended', () => {
  const row = (state: string): RankRow => ({ rank: 0, host: 'a', pid: 1, plane: 'shm', state, reason: '', cell: '[5]', paused: 'at a prompt', spans: 0, timesLast: 0, heldUp: 0, worst: 0, wait: 0, work: 0, bandwidth: 0 });
  assert.deepEqual(['running', 'idle', 'lost', 'left'].map(state => endedRow(row(state)).state), ['ended', 'ended', 'lost', 'left']);
  assert.deepEqual([endedRow(row('running')).cell, endedRow(row('running')).paused], ['', '']);
});

test('labels and statistics tell of the same time, so that they agree', () => {
  const store = new Store();
  // First rank 2 is late for long, later rank 1 is.
  rounds(store, 100, (round, rank) => (rank === (round < 50 ? 2 : 1) ? (round < 50 ? 700_000 : 300_000) : rank));
  for (const [from, to, slowest] of [[0, 100e6, 2], [60e6, 90e6, 1], [47.2e6, 49.3e6, 2]]) {
    const found = statistics(store, from, to);
    assert.deepEqual(found.ranks.map(one => one.heldUp), store.lanes.map(lane => lane.late.covered(from, to)));
    assert.equal(slowestOf(found.ranks, to - from)?.rank, slowest);
  }
});

test('a label says how long others waited in the time that is told of, and is bold only for the slowest rank', () => {
  const store = new Store();
  rounds(store, 100, (round, rank) => (rank === (round < 50 ? 2 : 1) ? 500_000 : rank));
  const written: [string, string][] = [];
  const context = { font: '', fillText: (text: string) => written.push([text, context.font.split(' ')[0]]) };
  const surface = { context, store, palette: paletteFor([255, 255, 255]), gutter: 132, told: [60e6, 100e6], slowest: store.lane(1) } as unknown as Surface;
  for (const lane of store.lanes) drawLabel(surface, lane, { y: 0, height: 36 }, 40, 0, [lane.rank, 3]);
  assert.deepEqual(written, [['rank 0', '600'], ['rank 1', '700'], ['others waited 20.0 ms', '11px'], ['rank 2', '600']]);
  written.length = 0;
  for (const lane of store.lanes) drawLabel(surface, lane, { y: 0, height: 16 }, 18, 0, [lane.rank, 3]);
  assert.deepEqual(written.map(([text]) => text), ['rank 0', 'rank 1', '50 %', 'rank 2'], 'a share of that time, as in the strip');
});
