import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import { UUID, type JSONObject } from '@lumino/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';
import { Liveness } from '../../ui/src/model/liveness.ts';
import { runs, Store } from '../../ui/src/model/store.ts';
import { Stream } from '../../ui/src/model/stream.ts';
import { OWN, REQUESTS, STREAM, TARGET, SubshellChannel, type FromKernel, type Pool } from './kernel_channel.ts';

const RENEW = 20_000; // ms; the kernel forgets a page that was silent for a minute
const ANSWER_WITHIN = 30_000;
const CELLS_KEPT = 500;

/** One pool as this page knows it. */
export interface Channel {
  readonly pool: string;
  /** Name of the recording whose rows are in the store; another one gets another store. */
  recording: string;
  store: Store;
  stream: Stream;
  /** Whether what is in the store is so now; another one when other ranks follow those of a kernel that has ended. */
  liveness: Liveness;
  /** What stands in the way of showing it; empty if nothing does. */
  problem: string;
  /** Whether there are ranks: the kernel may have none, or have ended. */
  ended: boolean;
}

interface Wish {
  pool: string;
  rows: boolean;
}

/** Feed of messages from the kernel of one notebook; goes on over restarts and lost connections. */
export class KernelFeed implements IDisposable {
  /** Something of this channel has changed; `null`: whether the kernel has anything for us at all. */
  readonly changed = new Signal<KernelFeed, Channel | null>(this);
  readonly session: ISessionContext;
  private readonly channels = new Map<string, Channel>();
  private readonly wishes = new Map<object, Wish>();
  private readonly questions = new Map<string, { resolve(answer: JSONObject): void; reject(reason: Error): void }>();
  /** Sources of cells by their number: the notebook does not show the number of a cell that still runs. */
  readonly sources = new Map<number, string>();
  private kernel: Kernel.IKernelConnection | null = null;
  private wire: SubshellChannel | null = null;
  private isHere = false;
  private isAway = false;
  private gone = false;
  /** Sessions of the kernel's process that spoke last, and of the one that a restart has ended. */
  private process: string | null = null;
  private endedProcess: string | null = null;
  private readonly timer: number;
  private most: number;

  private readonly trans: TranslationBundle;

  /** `limit`: how many rows a pool may have here. */
  constructor(session: ISessionContext, trans: TranslationBundle, limit: number) {
    this.session = session;
    this.trans = trans;
    this.most = limit;
    session.kernelChanged.connect(this.attach, this);
    session.statusChanged.connect(this.status, this);
    session.connectionStatusChanged.connect(this.connection, this);
    document.addEventListener('visibilitychange', this.seen);
    window.addEventListener('online', this.online);
    this.timer = window.setInterval(() => this.renew(), RENEW);
    this.attach();
  }

  /** Whether the extension is loaded in the kernel. */
  get here(): boolean {
    return this.isHere;
  }

  /** Whether the kernel can't be heard now: the network or the server is away. */
  get away(): boolean {
    return this.isAway && this.isHere;
  }

  get isDisposed(): boolean {
    return this.gone;
  }

  dispose(): void {
    if (this.gone) return;
    this.gone = true;
    clearInterval(this.timer);
    for (const { liveness } of this.channels.values()) liveness.dispose();
    document.removeEventListener('visibilitychange', this.seen);
    window.removeEventListener('online', this.online);
    this.kernel?.iopubMessage.disconnect(this.receive, this);
    Signal.clearData(this);
  }

  /** From now on so many rows are kept of each pool; what is here is asked for again. */
  set limit(limit: number) {
    if (limit === this.most) return;
    this.most = limit;
    for (const channel of this.channels.values()) {
      const { ranks, heading, membership } = channel.store;
      this.renewStore(channel);
      Object.assign(channel.store, { ranks, heading, membership });
      this.hello(channel);
      this.changed.emit(channel);
    }
  }

  channel(pool: string): Channel {
    let found = this.channels.get(pool);
    if (!found) {
      const channel = { pool, recording: '', problem: '', ended: true } as Channel;
      this.renewStore(channel);
      this.renewLiveness(channel);
      this.channels.set(pool, (found = channel));
    }
    return found;
  }

  /** Subscribe `owner` to a pool's rank table, or to all rows; `null` unsubscribes. */
  want(owner: object, wish: Wish | null): void {
    const before = this.wishes.get(owner);
    if (wish) this.wishes.set(owner, wish);
    else this.wishes.delete(owner);
    if (wish && (before?.pool !== wish.pool || before.rows !== wish.rows)) this.hello(this.channel(wish.pool));
  }

  /** All pools that can be shown. */
  async pools(): Promise<Pool[]> {
    return (await this.ask({ type: 'pools' })).pools as Pool[];
  }

  /** Asks the kernel something; an answer with an error is thrown. */
  ask(question: JSONObject, within = ANSWER_WITHIN): Promise<JSONObject> {
    const request = UUID.uuid4();
    return new Promise<JSONObject>((resolve, reject) => {
      if (!this.wire) return reject(new Error(this.trans.__('There is no kernel')));
      const timer = setTimeout(() => {
        if (this.questions.delete(request)) reject(new Error(this.trans.__('The kernel does not answer')));
      }, within);
      const done = <T>(act: (value: T) => void) => (value: T) => {
        clearTimeout(timer);
        act(value);
      };
      this.questions.set(request, { resolve: done(resolve), reject: done(reject) });
      void this.wire.say(REQUESTS, { ...question, request });
    });
  }

  // -- the kernel -----------------------------------------------------------------------------------------------------

  private attach(): void {
    const kernel = this.session.session?.kernel ?? null;
    if (kernel === this.kernel) return;
    this.kernel?.iopubMessage.disconnect(this.receive, this);
    this.lose();
    this.kernel = kernel;
    this.isAway = false;
    this.wire = kernel && new SubshellChannel(kernel);
    if (!kernel) return;
    kernel.iopubMessage.connect(this.receive, this);
    void this.seek(kernel);
  }

  /** Asks whether the extension is loaded. If it is not yet, it will say so when it is. */
  private async seek(kernel: Kernel.IKernelConnection): Promise<void> {
    try {
      if ((await kernel.spec)?.language !== 'python') return;
      // Whether a kernel is busy is not known at once.
      if (kernel.status !== 'idle') await settled(kernel);
      if (this.kernel === kernel && !this.isHere && (await this.wire!.knows(TARGET)) && this.kernel === kernel) this.arrive();
    } catch {
      // The kernel has ended or was restarted meanwhile: what follows it is told of in other ways.
    }
  }

  private arrive(): void {
    if (this.isHere) return;
    this.isHere = true;
    this.changed.emit(null);
    for (const channel of this.channels.values()) this.hello(channel);
  }

  private lose(): void {
    this.isHere = false;
    for (const channel of this.channels.values()) {
      channel.ended = true;
      channel.liveness.connected('ended');
      channel.store.heading = '';
      channel.store.version++;
    }
    for (const { reject } of this.questions.values()) reject(new Error(this.trans.__('The kernel has ended')));
    this.questions.clear();
    this.changed.emit(null);
  }

  private status(_: ISessionContext, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting' || status === 'dead') {
      this.endedProcess = this.process;
      if (this.kernel) this.wire = new SubshellChannel(this.kernel);
      this.lose();
    }
  }

  private connection(_: ISessionContext, status: Kernel.ConnectionStatus): void {
    const away = status !== 'connected';
    if (away !== this.isAway) {
      this.isAway = away;
      for (const channel of this.channels.values()) channel.liveness.connected(away ? 'away' : 'here');
      this.changed.emit(null);
    }
    if (status !== 'connected' || !this.kernel) return;
    if (this.isHere) for (const channel of this.channels.values()) this.hello(channel);
    else void this.seek(this.kernel);
  }

  private readonly seen = () => {
    // A page that was hidden for long was forgotten by the kernel, and may have missed something.
    if (document.hidden) return;
    this.online();
    for (const channel of this.channels.values()) this.hello(channel);
  };

  /** JupyterLab tries some times to connect again and then never more; the network may have been away for longer. */
  private readonly online = () => {
    if (this.isHere && this.kernel?.connectionStatus === 'disconnected') void this.kernel.reconnect().catch(() => undefined);
  };

  private renew(): void {
    if (document.hidden || !this.isHere) return;
    this.online();
    if (this.isAway) return;
    for (const channel of this.channels.values()) {
      const rows = this.wanted(channel);
      if (rows !== null) this.say({ type: 'hello', pool: channel.pool, recording: channel.recording, rows });
    }
  }

  /** Return whether any owner subscribes to the pool's rows; `null` without subscribers. */
  private wanted(channel: Channel): boolean | null {
    const wishes = [...this.wishes.values()].filter(wish => wish.pool === channel.pool);
    return wishes.length ? wishes.some(wish => wish.rows) : null;
  }

  private hello(channel: Channel): void {
    // A new connection says hello by itself.
    if (this.isHere && !this.isAway && this.wanted(channel) !== null) channel.stream.hello();
  }

  private say(data: JSONObject): void {
    void this.wire?.say(REQUESTS, data).catch(() => undefined);
  }

  // -- what comes -----------------------------------------------------------------------------------------------------

  private renewStore(channel: Channel): void {
    channel.store = new Store(this.most);
    const send = (hello: unknown) => this.say({ ...(hello as JSONObject), pool: channel.pool, recording: channel.recording, rows: this.wanted(channel) ?? false });
    channel.stream = new Stream(channel.store, { get: () => undefined, on: () => undefined, off: () => undefined, send });
  }

  private renewLiveness(channel: Channel): void {
    const liveness = new Liveness(() => this.changed.emit(channel));
    channel.liveness = liveness;
    if (this.isAway) liveness.connected('away');
  }

  private receive(_: Kernel.IKernelConnection, message: KernelMessage.IIOPubMessage): void {
    // The process of a kernel is known by its session. Its last messages, while it ends its ranks, come after the news of its own end: without
    // this they would show ranks that are gone as live.
    if (message.header.session === this.endedProcess) return;
    this.process = message.header.session;
    const content = message.content as { comm_id?: string; data?: unknown; code?: string; execution_count?: number };
    if (message.header.msg_type === 'execute_input') this.ran(content.execution_count ?? 0, content.code ?? '');
    if (content.comm_id !== STREAM) return;
    if (message.header.msg_type === 'comm_close') this.lose();
    if (message.header.msg_type !== 'comm_msg') return;
    const data = content.data as FromKernel;
    if (data.type === 'answer') this.answered(data);
    else if (data.type === 'nothing') this.nothing(this.channel(data.pool), data.text ?? '');
    else if (data.type === 'rows') this.rows(data, message.buffers ?? []);
    else if (this.isHere) for (const channel of this.channels.values()) this.hello(channel); // loaded again: it knows nothing of us
    this.arrive();
  }

  private ran(number: number, source: string): void {
    this.sources.delete(number);
    this.sources.set(number, source);
    for (const oldest of this.sources.keys()) {
      if (this.sources.size <= CELLS_KEPT) break;
      this.sources.delete(oldest);
    }
  }

  private answered(data: { request: string | null; error?: string } & JSONObject): void {
    const question = this.questions.get(data.request ?? '');
    this.questions.delete(data.request ?? '');
    if (data.error === undefined) question?.resolve(data);
    else question?.reject(new Error(data.error));
  }

  private nothing(channel: Channel, problem: string): void {
    channel.problem = problem;
    channel.ended = true;
    // The picture stays, and no more of it comes: an answer without rows is no news of the ranks.
    channel.liveness.connected(problem ? 'away' : 'ended');
    channel.store.heading = '';
    channel.store.version++;
    this.changed.emit(channel);
  }

  private rows(data: { pool: string; recording: string; heading?: string }, buffers: (ArrayBuffer | ArrayBufferView)[]): void {
    const channel = this.channels.get(data.pool);
    if (!channel) return;
    if (channel.recording !== data.recording) {
      if (channel.recording) this.renewStore(channel);
      channel.recording = data.recording;
    }
    channel.problem = '';
    if (channel.liveness.standing === 'ended') this.renewLiveness(channel);
    // There was a problem with the pool, and there is none now.
    if (!this.isAway) channel.liveness.connected('here');
    if (data.heading !== undefined) channel.ended = data.heading === 'stopped';
    const { store, stream } = channel;
    if (this.wanted(channel)) stream.receive(data as never, buffers.map(view) as never);
    else {
      // Another page asked for these rows; only the rank table among them is ours.
      const { ranks, heading, membership } = data as { ranks?: typeof store.ranks; heading?: string; membership?: typeof store.membership };
      if (!ranks && !membership) return channel.liveness.heard(runs(store));
      if (ranks) {
        store.ranks = ranks;
        store.heading = heading ?? '';
      }
      store.membership = membership ?? store.membership;
      store.version++;
    }
    channel.liveness.heard(runs(store));
    this.changed.emit(channel);
  }
}

function view(buffer: ArrayBuffer | ArrayBufferView): DataView {
  return ArrayBuffer.isView(buffer) ? new DataView(buffer.buffer as ArrayBuffer, buffer.byteOffset, buffer.byteLength) : new DataView(buffer);
}

/** Until the kernel is idle, or for as long as it takes one that is to say so. */
function settled(kernel: Kernel.IKernelConnection): Promise<void> {
  return new Promise(resolve => {
    const look = () => {
      if (kernel.status === 'idle' || kernel.isDisposed) done();
    };
    const done = () => {
      clearTimeout(timer);
      kernel.statusChanged.disconnect(look);
      resolve();
    };
    const timer = setTimeout(done, 1000);
    kernel.statusChanged.connect(look);
  });
}

/** The feeds of all notebooks that are open. */
export class KernelFeeds {
  private readonly known = new Map<ISessionContext, KernelFeed>();
  private most = 1_000_000;
  private readonly trans: TranslationBundle;

  constructor(trans: TranslationBundle) {
    this.trans = trans;
  }

  of(session: ISessionContext): KernelFeed {
    let feed = this.known.get(session);
    if (!feed || feed.isDisposed) {
      const made = new KernelFeed(session, this.trans, this.most);
      this.known.set(session, (feed = made));
      session.disposed.connect(() => {
        made.dispose();
        this.known.delete(session);
      });
    }
    return feed;
  }

  /** Rows that are kept of each pool. */
  get limit(): number {
    return this.most;
  }

  set limit(limit: number) {
    this.most = limit;
    for (const feed of this.known.values()) feed.limit = limit;
  }
}

export { OWN };
