import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { INotebookTracker } from '@jupyterlab/notebook';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';
import type { KernelFeed, KernelFeeds } from './feed.ts';

/** A debug request, and the event of its changes; the kernel's side is kernel_ext/notebook/debugger/multiplexer.py. */
export const SCOPE = 'hvdlab/scope';
export const ONE_RANK = 'hvdlab:debug-one-rank';

interface Scope {
  /** Whether the debugger's buttons move one rank only. */
  alone: boolean;
  /** The rank that is looked at. */
  rank: number | null;
  stoppedRanks: number[];
}

const NOBODY: Scope = { alone: false, rank: null, stoppedRanks: [] };

/** Which ranks of the notebook in front have stopped in JupyterLab's debugger, and whom its buttons move. */
export class StoppedRanks {
  readonly changed = new Signal<StoppedRanks, void>(this);
  private scope = NOBODY;
  private kernel: Kernel.IKernelConnection | null = null;
  private feed: KernelFeed | null = null;
  private readonly notebooks: INotebookTracker;
  private readonly feeds: KernelFeeds;

  constructor(notebooks: INotebookTracker, feeds: KernelFeeds) {
    this.notebooks = notebooks;
    this.feeds = feeds;
    notebooks.currentChanged.connect(this.look, this);
    this.look();
  }

  get alone(): boolean {
    return this.scope.alone;
  }

  /** The rank that is looked at; `null`: none has stopped. */
  get rank(): number | null {
    return this.scope.rank;
  }

  /** Lets the buttons move one rank only, or all that have stopped. */
  async choose(alone: boolean): Promise<void> {
    await this.ask({ alone });
  }

  private look(): void {
    const front = this.notebooks.currentWidget;
    const feed = front && this.feeds.of(front.sessionContext);
    if (feed !== this.feed) {
      this.feed?.changed.disconnect(this.look, this);
      this.feed = feed;
      feed?.changed.connect(this.look, this);
    }
    const kernel = feed?.here ? (feed.session.session?.kernel ?? null) : null;
    if (kernel === this.kernel) return;
    this.kernel?.iopubMessage.disconnect(this.heard, this);
    this.kernel = kernel;
    this.take(NOBODY);
    if (!kernel) return;
    kernel.iopubMessage.connect(this.heard, this);
    void this.ask({});
  }

  /** From the first answer on the kernel sends changes by itself. */
  private async ask(choice: { alone?: boolean }): Promise<void> {
    const { kernel } = this;
    if (!kernel) return;
    try {
      const reply = await kernel.requestDebug({ type: 'request', seq: 0, command: SCOPE, arguments: choice } as never).done;
      const body = reply.content?.body as Partial<Scope> | undefined;
      if (kernel === this.kernel && body?.stoppedRanks) this.take(body as Scope);
    } catch {
      // The kernel has ended, or has no debugger.
    }
  }

  private heard(_: Kernel.IKernelConnection, message: KernelMessage.IIOPubMessage): void {
    if (message.header.msg_type !== 'debug_event') return;
    const { event, body } = message.content as { event?: string; body?: Partial<Scope> & { description?: string } };
    if (event === SCOPE) this.take(body as Scope);
    // It had been asked before the debugger was on.
    else if (event === 'stopped' && this.rank === null && /^rank \d+/.test(body?.description ?? '')) void this.ask({});
  }

  private take(scope: Scope): void {
    this.scope = scope;
    this.changed.emit();
  }
}

/** Adds the command, whose button is in the notebook's toolbar while a rank has stopped. */
export function addOneRank(app: JupyterFrontEnd, notebooks: INotebookTracker, feeds: KernelFeeds, trans: TranslationBundle): void {
  const stopped = new StoppedRanks(notebooks, feeds);
  app.commands.addCommand(ONE_RANK, {
    label: ({ toolbar }) => (toolbar && stopped.rank !== null ? trans.__('Rank %1 Only', stopped.rank) : trans.__('Debug One Rank Only')),
    caption: () => (stopped.rank === null ? '' : trans.__('Step and continue move rank %1 only, not all that have stopped', stopped.rank)),
    isVisible: ({ toolbar }) => !toolbar || stopped.rank !== null,
    isEnabled: () => stopped.rank !== null,
    isToggleable: true,
    isToggled: () => stopped.alone,
    execute: () => stopped.choose(!stopped.alone),
  });
  stopped.changed.connect(() => app.commands.notifyCommandChanged(ONE_RANK));
}
