import { ranks as named } from '../draw/format.ts';
import type { Liveness } from '../model/liveness.ts';
import { endingBySize, lives, lost, type Change, type Member, type MembershipState, type Phase, type Stretch } from '../model/membership.ts';
import type { Failure } from '../model/store.ts';
import { t } from '../texts.ts';
import { h, FailuresBox, standingText, watchTheme } from './dom.ts';

/** Change that the user asks for; `ends` are the ranks that the user has agreed to end. */
export type Wish = { what: 'resize'; np: number; ends: number[] } | { what: 'repair' } | { what: 'restart'; ranks: number[]; ends: number[] } | { what: 'sync' };

/** Asks the kernel to do it; gives what was done in words, and throws what was in the way. */
export type Act = (wish: Wish) => Promise<string>;

const TICK = 1000;
/** After this time (ms) without a sign of the kernel the view explains the likely cause of the wait. */
const PATIENCE = 3000;
const SIGNS: Record<Change['what'], string> = { joined: '▲', waits: '◷', admitted: '▶', died: '✕', left: '▼', formed: '◆' };

/** View of the ranks, their lives and changes, with buttons that change the pool. They ask before a rank ends. */
export class MembershipView {
  readonly root: HTMLElement;
  private readonly act: Act;
  private readonly heading = h('span', { class: 'hvd-status', role: 'status' });
  private readonly size = h('input', { type: 'number', min: '1', max: '9999', class: 'hvd-size', 'aria-label': t('Number of ranks') }) as HTMLInputElement;
  private readonly resize = this.button(t('Resize'), () => this.askResize());
  private readonly repair = this.button(t('Repair'), () => this.start({ what: 'repair' }));
  private readonly sync = this.button(t('Sync'), () => this.start({ what: 'sync' }));
  private readonly restart = this.button(t('Restart all …'), () => this.askRestart(this.state!.members.map(member => member.rank)));
  private readonly question = h('div', { class: 'hvd-question', role: 'alertdialog', hidden: '' });
  private readonly said = h('div', { class: 'hvd-said', role: 'status', hidden: '' });
  private readonly lanes = h('div', { class: 'hvd-lives' });
  private readonly members = h('tbody');
  private readonly history = h('tbody');
  private readonly earlier = h('div', { class: 'hvd-faint', hidden: '' });
  private readonly failures = new FailuresBox();
  private readonly endTheme: () => void;
  private readonly timer: number;
  private state: MembershipState | null = null;
  /** How far the kernel's clock is ahead of this page's, in seconds. */
  private ahead = 0;
  /** Says that what is shown is of the past; the clock then stands at `stopped`. */
  private past = '';
  private stopped = 0;
  /** Whether something was asked for that the kernel has not answered. */
  private waits = false;
  /** Element that had the focus before the question. */
  private before: Element | null = null;
  private sizeKnown = 0;

  constructor(parent: HTMLElement, act: Act) {
    this.act = act;
    const buttons = h('span', { class: 'hvd-changes', role: 'group', 'aria-label': t('Change the ranks') }, this.size, this.resize, this.repair, this.sync, this.restart);
    const bar = h('div', { class: 'hvd-bar' }, h('strong', {}, t('Membership')), this.heading, h('span', { class: 'hvd-space' }), buttons);
    const heads = (...names: string[]) => h('thead', {}, h('tr', {}, ...names.map(name => h('th', { scope: 'col' }, name))));
    const members = h('table', { class: 'hvd-members' }, heads(t('rank'), t('state'), t('where'), t('since'), t('by'), ''), this.members);
    const history = h('table', { class: 'hvd-history' }, heads(t('time'), t('rank'), t('change'), t('why'), t('where')), this.history);
    this.root = h(
      'div',
      { class: 'hvd-view hvd-membership' },
      bar,
      this.failures.root,
      this.question,
      this.said,
      this.lanes,
      h('div', { class: 'hvd-columns' }, h('div', { class: 'hvd-scroll' }, members), h('div', { class: 'hvd-scroll hvd-log', tabindex: '0', role: 'region', 'aria-label': t('History') }, history, this.earlier)),
    );
    this.size.addEventListener('keydown', event => {
      // Otherwise the notebook would handle the key; keys with a modifier are meant for the page.
      if (!event.ctrlKey && !event.metaKey && !event.altKey) event.stopPropagation();
      if (event.key === 'Enter') this.askResize();
    });
    this.question.addEventListener('keydown', event => {
      if (event.key !== 'Escape') return;
      event.stopPropagation();
      this.close();
    });
    parent.append(this.root);
    this.endTheme = watchTheme(this.root, () => undefined);
    this.timer = window.setInterval(() => this.tick(), TICK);
    this.enable();
  }

  update(state: MembershipState | null, failures: readonly Failure[] = []): void {
    this.failures.update(failures);
    if (!state?.members) {
      this.heading.textContent = t('waiting for ranks');
      return;
    }
    // The panel says it with each span that comes; what is there stays, so that it can be clicked.
    if (state === this.state) return;
    this.state = state;
    this.ahead = state.now - Date.now() / 1000;
    this.show(state);
  }

  private show(state: MembershipState): void {
    this.heading.textContent = this.past || this.happens(state);
    this.heading.title = state.headline;
    this.root.dataset.past = String(!!this.past);
    if (state.members.length !== this.sizeKnown) this.size.value = String((this.sizeKnown = state.members.length));
    this.members.replaceChildren(...state.members.map(member => this.member(member)));
    this.history.replaceChildren(...state.history.map(change => this.change(change)).reverse());
    this.earlier.hidden = !state.earlier;
    this.earlier.textContent = t('and %1 earlier changes', state.earlier);
    this.draw();
    this.enable();
  }

  /** The kernel speaks, or does not any more: then the clock stops, and nothing can be asked for. */
  stand(liveness: Liveness): void {
    const past = standingText(liveness);
    this.stopped = liveness.at / 1000 + this.ahead;
    // The panel says it with each span that comes; buttons that are replaced meanwhile could not be clicked.
    if (past === this.past) return;
    this.past = past;
    if (this.state) this.show(this.state);
  }

  private happens(state: MembershipState): string {
    return state.ended ? t('stopped') : state.busy ? `${state.busy} …` : state.headline;
  }

  dispose(): void {
    clearInterval(this.timer);
    this.endTheme();
    this.root.remove();
  }

  // -- what is shown --------------------------------------------------------------------------------------------------

  private member(member: Member): HTMLElement {
    const isNew = this.state!.newcomers.includes(member.rank);
    const kind = member.state === 'lost' ? 'lost' : member.state === 'here' ? 'running' : 'idle';
    const again = this.button(t('Restart …'), () => this.askRestart([member.rank]));
    again.setAttribute('aria-label', t('Restart rank %1', member.rank));
    again.disabled = this.busy || !this.state!.replaceable;
    return h(
      'tr',
      { 'data-rank': String(member.rank) },
      h('th', { scope: 'row' }, String(member.rank)),
      h('td', {}, h('span', { class: 'hvd-state', 'data-state': kind }, stateText(member)), isNew && h('span', { class: 'hvd-faint' }, ` ${t('knows nothing yet')}`), member.reason && h('div', { class: 'hvd-faint' }, member.reason)),
      h('td', {}, place(member)),
      h('td', {}, member.since ? clock(member.since) : ''),
      h('td', {}, t(member.by)),
      h('td', {}, again),
    );
  }

  private change(change: Change): HTMLElement {
    const what = h('td', { class: 'hvd-what', 'data-what': change.what }, h('span', { 'aria-hidden': 'true' }, `${SIGNS[change.what] ?? ''} `), t(change.what === 'formed' ? 'regrouped' : change.what));
    return h('tr', {}, h('td', {}, clock(change.when)), h('td', {}, change.rank < 0 ? '' : String(change.rank)), what, h('td', {}, change.why), h('td', {}, place(change)));
  }

  /** A lane for each rank: when it was there, when it waited to be let in, when it was missing; and above them from when on other ranks worked together. */
  private draw(): void {
    const state = this.state!;
    const begin = state.history[0]?.when ?? state.now;
    const length = Math.max(1, this.now - begin);
    const at = (when: number) => `${((100 * (when - begin)) / length).toFixed(3)}%`;
    const lane = (label: string, nodes: HTMLElement[]) => h('div', { class: 'hvd-life' }, h('span', { class: 'hvd-life-name' }, label), h('span', { class: 'hvd-life-track' }, ...nodes));
    const formed = state.history.filter(change => change.what === 'formed');
    const generations = formed.map(change => h('span', { class: 'hvd-formed', style: `left:${at(change.when)}`, role: 'img', title: `${clock(change.when)} ${change.why}`, 'aria-label': `${clock(change.when)} ${change.why}` }));
    const rows = [...lives(state)].map(([rank, life]) => lane(String(rank), life.map(one => stretch(rank, one, at, begin + length))));
    const ends = h('div', { class: 'hvd-life hvd-faint' }, h('span', { class: 'hvd-life-name' }), h('span', { class: 'hvd-life-ends' }, h('span', {}, clock(begin)), h('span', {}, clock(begin + length))));
    this.lanes.replaceChildren(...(formed.length ? [lane(t('regrouped'), generations)] : []), ...rows, ends);
  }

  private tick(): void {
    // A page that is hidden, or a view that was scrolled away, costs nothing.
    if (this.state && !this.state.ended && !this.past && !document.hidden && this.lanes.offsetParent) this.draw();
  }

  private get now(): number {
    if (this.past) return this.stopped;
    return this.state!.ended ? this.state!.now : Date.now() / 1000 + this.ahead;
  }

  // -- what is done ---------------------------------------------------------------------------------------------------

  private get busy(): boolean {
    return this.waits || !!this.past || !this.state || this.state.ended || !!this.state.busy;
  }

  private enable(): void {
    const { state, busy } = this;
    this.resize.disabled = this.size.disabled = busy;
    this.repair.disabled = busy || !state!.replaceable || !lost(state!).length;
    this.sync.disabled = busy || !state!.newcomers.length;
    this.restart.disabled = busy || !state!.replaceable;
    this.repair.title = t('Start lost ranks again, with empty memory');
    this.sync.title = t('Bring newcomers what the others know');
  }

  private button(label: string, act: () => void): HTMLButtonElement {
    const element = h('button', { type: 'button', class: 'hvd-link' }, label) as HTMLButtonElement;
    element.addEventListener('click', act);
    return element;
  }

  private askResize(): void {
    const np = Number(this.size.value);
    if (this.busy || !Number.isInteger(np) || np < 1) return;
    const ends = endingBySize(this.state!, np);
    if (!ends.length) return this.start({ what: 'resize', np, ends });
    const how = this.state!.cells.length ? t('They take part until the next commit, hand over what only they know, and end.') : t('What they run ends, and their memory is lost.');
    this.ask(t('%1 would end. %2', named(ends), how), t('End %1', named(ends)), { what: 'resize', np, ends });
  }

  private askRestart(ranks: number[]): void {
    if (this.busy) return;
    const ends = ranks.filter(rank => this.state!.members.some(member => member.rank === rank && member.state !== 'lost'));
    const wish: Wish = { what: 'restart', ranks, ends };
    if (!ends.length) return this.start(wish);
    this.ask(t('%1 would end, whatever runs there, and start again with empty memory.', named(ends)), t('Restart %1', named(ends)), wish);
  }

  private ask(text: string, yes: string, wish: Wish): void {
    this.before = document.activeElement;
    const keep = this.button(t('Keep them'), () => this.close());
    const go = this.button(yes, () => {
      this.close();
      this.start(wish);
    });
    go.classList.add('hvd-ends');
    this.question.replaceChildren(h('span', {}, text), go, keep);
    this.question.setAttribute('aria-label', text);
    this.question.hidden = false;
    keep.focus();
  }

  private close(): void {
    this.question.hidden = true;
    if (this.before instanceof HTMLElement && this.root.contains(this.before)) this.before.focus();
  }

  private start(wish: Wish): void {
    this.waits = true;
    this.say('', '');
    this.enable();
    const timer = window.setTimeout(() => {
      if (this.waits && !this.state?.busy) this.say(t('The kernel has not answered; it may hear this only when its cell has ended.'), 'waiting');
    }, PATIENCE);
    const done = (text: string, tone: string) => {
      clearTimeout(timer);
      this.waits = false;
      this.say(text, tone);
      if (this.state) this.show(this.state);
    };
    this.act(wish).then(
      text => done(text, 'done'),
      (error: unknown) => done(error instanceof Error ? error.message : String(error), 'failed'),
    );
  }

  private say(text: string, tone: string): void {
    this.said.textContent = text;
    this.said.dataset.tone = tone;
    this.said.hidden = !text;
  }
}

function stretch(rank: number, one: Stretch, at: (when: number) => string, now: number): HTMLElement {
  const to = one.to ?? now;
  const phases: Record<Phase, string> = { here: t('rank %1 is there', rank), waiting: t('rank %1 waits to be let in', rank), missing: t('rank %1 is missing', rank) };
  const began = one.began ? `: ${one.began.why}` : '';
  const text = `${phases[one.phase]}, ${clock(one.from)}–${one.to === null ? '' : clock(one.to)}${began}`;
  return h('span', { class: 'hvd-stretch', 'data-phase': one.phase, role: 'img', title: text, 'aria-label': text, style: `left:${at(one.from)};right:calc(100% - ${at(to)})` });
}

function stateText({ state }: Member): string {
  if (state === 'here') return t('ready');
  return state === 'waiting' ? t('waits to be let in') : t(state);
}

function place({ host, pid }: { host: string; pid: number }): string {
  return host && pid ? `${host} · ${pid}` : host;
}

/** The time of the day where the reader is. */
function clock(when: number): string {
  return new Date(when * 1000).toTimeString().slice(0, 8);
}
