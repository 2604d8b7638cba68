import assert from 'node:assert/strict';
import { test } from 'node:test';
import { type Change, endingBySize, lives, lost, type Member, type MembershipState } from '../src/model/membership.ts';

function change(when: number, rank: number, what: Change['what'], why = ''): Change {
  return { rank, what, why, host: 'here', pid: 1, when };
}

function member(rank: number, state: Member['state'] = 'here'): Member {
  return { rank, state, reason: '', host: 'here', pid: 1, since: 0, by: 'start' };
}

function state(members: Member[], history: Change[], more: Partial<MembershipState> = {}): MembershipState {
  return { headline: '', generation: 1, members, newcomers: [], cells: [], history, earlier: 0, ended: false, busy: '', replaceable: true, now: 100, ...more };
}

/** The lives as short texts: `here 1-4`. */
function told(given: MembershipState): Record<number, string[]> {
  return Object.fromEntries([...lives(given)].map(([rank, all]) => [rank, all.map(one => `${one.phase} ${one.from}-${one.to ?? ''}`)]));
}

test('a rank that died is missing until it is replaced, and waits until it is let in', () => {
  const history = [change(1, 0, 'joined'), change(1, 1, 'joined'), change(5, 1, 'died'), change(8, 1, 'joined'), change(9, 1, 'waits'), change(12, 1, 'admitted'), change(12, -1, 'formed')];
  assert.deepEqual(told(state([member(0), member(1)], history)), { 0: ['here 1-'], 1: ['here 1-5', 'missing 5-8', 'here 8-9', 'waiting 9-12', 'here 12-'] });
});

test('one that left is not missing, nor one that died and is wanted no more', () => {
  const history = [change(1, 0, 'joined'), change(1, 1, 'joined'), change(1, 2, 'joined'), change(4, 2, 'left'), change(6, 1, 'died')];
  assert.deepEqual(told(state([member(0)], history)), { 0: ['here 1-'], 1: ['here 1-6'], 2: ['here 1-4'] });
  assert.deepEqual(told(state([member(0), member(1, 'lost')], history))[1], ['here 1-6', 'missing 6-']);
});

test('what came before the history that is here is taken as it must have been', () => {
  const history = [change(10, 0, 'died'), change(12, 0, 'joined'), change(13, 2, 'admitted'), change(15, 3, 'waits')];
  const found = told(state([member(0), member(1), member(2), member(3, 'waiting')], history, { earlier: 7 }));
  assert.deepEqual(found, { 0: ['here 10-10', 'missing 10-12', 'here 12-'], 1: ['here 10-'], 2: ['waiting 10-13', 'here 13-'], 3: ['here 10-15', 'waiting 15-'] });
});

test('who would end by a change of the size', () => {
  const given = state([member(0), member(1), member(2, 'lost'), member(3, 'waiting')], []);
  assert.deepEqual([endingBySize(given, 2), endingBySize(given, 4), endingBySize(given, 1), lost(given)], [[3], [], [1, 3], [2]]);
});
