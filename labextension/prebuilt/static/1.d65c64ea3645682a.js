"use strict";(self.rspackChunk_hvdlab_labextension=self.rspackChunk_hvdlab_labextension||[]).push([[1],{24(e,t,a){var i=a(25),r=a.n(i),d=a(26),o=(a.n(d))()(r());o.push([e.id,`.hvd-view {
  --hvd-background: var(--jp-layout-color0, var(--vscode-editor-background, #fff));
  --hvd-text: var(--jp-ui-font-color1, var(--vscode-editor-foreground, #20252e));
  --hvd-faint: #68707d;
  --hvd-line: rgba(128, 136, 150, 0.25);
  --hvd-fill: rgba(128, 136, 150, 0.12);
  --hvd-late: #d55e00;
  --hvd-late-text: #a84300;
  --hvd-work: #0072b2;
  --hvd-wait: #c1c9d6;
  --hvd-good: #00775a;
  --hvd-link: #005f96;
  position: relative;
  box-sizing: border-box;
  overflow: hidden;
  border: 1px solid var(--hvd-line);
  border-radius: 8px;
  background: var(--hvd-background);
  color: var(--hvd-text);
  font: 12px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
.hvd-view[data-theme="dark"] {
  --hvd-faint: #959daa;
  --hvd-late: #ff7a29;
  --hvd-late-text: #ff9c5e;
  --hvd-work: #409cde;
  --hvd-wait: #475061;
  --hvd-good: #35c79a;
  --hvd-link: #6db8ea;
}
.hvd-view *, .hvd-view *::before { box-sizing: border-box; }
.hvd-bar {
  display: flex;
  flex-wrap: wrap;
  align-items: center;
  gap: 6px 10px;
  min-height: 38px;
  padding: 5px 8px 5px 12px;
  border-bottom: 1px solid var(--hvd-line);
}
.hvd-bar strong { margin: 0; padding: 0; font-size: 13px; line-height: 18px; }
.hvd-bar > span { line-height: 18px; }
.hvd-space { flex: 1; }
.hvd-notice { color: var(--hvd-good); }
.hvd-status, .hvd-faint { color: var(--hvd-faint); }
.hvd-state {
  display: inline-flex;
  align-items: center;
  gap: 5px;
  padding: 0 8px;
  border-radius: 9px;
  background: var(--hvd-fill);
  line-height: 18px;
  white-space: nowrap;
}
.hvd-state::before { content: ""; width: 7px; height: 7px; border-radius: 50%; background: var(--hvd-faint); }
.hvd-view[data-past="true"] .hvd-scroll, .hvd-view[data-past="true"] .hvd-lives { opacity: 0.55; }
.hvd-view[data-past="true"] .hvd-state::before { background: var(--hvd-faint) !important; }
.hvd-state[data-live="true"]::before, .hvd-state[data-state="running"]::before { background: var(--hvd-good); }
.hvd-state[data-state="paused"]::before { border-radius: 0; background: linear-gradient(90deg, currentColor 40%, transparent 40% 60%, currentColor 60%); }
.hvd-paused { margin-left: 8px; white-space: nowrap; }
.hvd-state[data-state="lost"]::before { border-radius: 0; background: var(--hvd-late); }
.hvd-bar input {
  flex: 1 1 116px;
  max-width: 150px;
  min-width: 0;
  height: 26px;
  padding: 0 8px;
  border: 1px solid var(--hvd-line);
  border-radius: 5px;
  background: transparent;
  color: inherit;
  font: inherit;
}
.hvd-bar input::placeholder { color: var(--hvd-faint); opacity: 1; }
.hvd-buttons { display: inline-flex; border: 1px solid var(--hvd-line); border-radius: 5px; }
.hvd-buttons button {
  min-width: 28px;
  height: 24px;
  padding: 0 7px;
  border: 0;
  border-left: 1px solid var(--hvd-line);
  background: transparent;
  color: inherit;
  font: inherit;
  font-size: 13px;
  line-height: 1;
  cursor: pointer;
}
.hvd-buttons > button:first-child { border-left: 0; font-size: 10px; }
.hvd-drop { position: relative; display: inline-flex; }
.hvd-menu {
  position: absolute;
  z-index: 7;
  top: 27px;
  right: -1px;
  padding: 4px 0;
  border: 1px solid var(--hvd-line);
  border-radius: 6px;
  background: var(--hvd-background);
  box-shadow: 0 4px 18px rgba(0, 0, 0, 0.22);
}
.hvd-buttons .hvd-menu a { box-sizing: border-box; color: inherit; line-height: 28px; text-decoration: none; }
.hvd-buttons .hvd-menu a:hover { background: var(--hvd-fill); }
.hvd-buttons .hvd-menu :is(button, a) { display: block; width: 100%; height: 28px; padding: 0 14px; border: 0; font-size: 12px; text-align: left; white-space: nowrap; }
.hvd-link {
  margin: 0;
  padding: 0 6px;
  border: 1px solid var(--hvd-line);
  border-radius: 4px;
  background: transparent;
  color: inherit;
  font: inherit;
  font-weight: 400;
  line-height: 17px;
  cursor: pointer;
}
.hvd-link:hover { background: var(--hvd-fill); }
.hvd-view h4 .hvd-link { margin-left: 8px; font-size: 11px; }
.hvd-view .hvd-site { color: var(--hvd-faint); font-size: 11.5px; white-space: nowrap; }
.hvd-view .hvd-site.hvd-link { border: 0; padding: 0; color: var(--hvd-link); text-decoration: underline; text-underline-offset: 2px; text-decoration-thickness: 1px; }
.hvd-buttons button[aria-pressed="true"] { background: var(--hvd-fill); }
.hvd-buttons button:hover { background: var(--hvd-fill); }
.hvd-view :focus-visible { outline: 2px solid var(--hvd-work); outline-offset: -2px; }
.hvd-plot { position: relative; }
.hvd-plot canvas { display: block; touch-action: pan-y; }
.hvd-minimap { padding-top: 4px; }
.hvd-minimap canvas { display: block; touch-action: none; }
.hvd-charts { border-top: 1px solid var(--hvd-line); }
.hvd-fill-parent { display: flex; flex-direction: column; height: 100%; min-height: 0; border: 0; border-radius: 0; }
.hvd-fill-parent > * { flex: none; }
.hvd-fill-parent > .hvd-plot { overflow: hidden auto; }
.hvd-fill-parent > .hvd-charts:not([hidden]) { display: flex; max-height: 32%; }
.hvd-fill-parent > .hvd-charts > * { flex: 1; display: flex; flex-direction: column; min-width: 0; }
.hvd-fill-parent > .hvd-charts .hvd-chart-list { flex: 1; max-height: none; min-height: 0; }
.hvd-fill-parent > .hvd-details { flex: 1 1 0; overflow: auto; align-content: flex-start; }
.hvd-failures { padding: 4px 12px 6px; border-bottom: 1px solid var(--hvd-line); color: var(--hvd-faint); }
.hvd-failures[hidden] { display: none; }
.hvd-failures summary { cursor: pointer; }
.hvd-failures pre { margin: 4px 0; max-height: 180px; overflow: auto; font-size: 11px; color: inherit; background: none; }
.hvd-legend { display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 4px 12px 7px; color: var(--hvd-faint); }
.hvd-swatch { display: inline-block; width: 12px; height: 12px; border-radius: 2px; vertical-align: -2px; }
.hvd-tip {
  position: absolute;
  z-index: 5;
  top: 0;
  left: 0;
  max-width: 340px;
  padding: 8px 10px;
  border: 1px solid var(--hvd-line);
  border-radius: 6px;
  background: var(--hvd-background);
  box-shadow: 0 4px 18px rgba(0, 0, 0, 0.22);
  pointer-events: none;
}
.hvd-tip-name { font-weight: 600; overflow-wrap: anywhere; }
.hvd-view [hidden] { display: none; }
.hvd-view dl { display: grid; grid-template-columns: auto 1fr; gap: 1px 12px; margin: 4px 0 0; padding: 0; }
.hvd-view dt, .hvd-view dd { float: none; width: auto; margin: 0; padding: 0; font-weight: 400; line-height: inherit; }
.hvd-view dt { color: var(--hvd-faint); white-space: nowrap; }
.hvd-view .hvd-help {
  position: absolute;
  z-index: 6;
  top: 44px;
  right: 8px;
  max-height: calc(100% - 52px);
  overflow: auto;
  padding: 10px 14px;
  border: 1px solid var(--hvd-line);
  border-radius: 6px;
  background: var(--hvd-background);
  box-shadow: 0 4px 18px rgba(0, 0, 0, 0.22);
}
.hvd-view .hvd-help[hidden] { display: none; }
.hvd-details { display: flex; flex-wrap: wrap; gap: 12px 32px; padding: 9px 12px 11px; border-top: 1px solid var(--hvd-line); }
.hvd-details:empty { display: none; }
.hvd-details section { flex: 1 1 260px; min-width: 0; }
.hvd-details .hvd-names { flex: 4 1 640px; overflow-x: auto; }
.hvd-view h4 { margin: 0 0 5px; padding: 0; font-size: 12px; font-weight: 600; }
.hvd-view h4 code { font-size: 12px; background: none; color: inherit; }
.hvd-view table { border-collapse: collapse; margin: 0; width: 100%; font-size: 12px; color: inherit; border: 0; }
.hvd-view tr, .hvd-view tbody tr:nth-child(odd), .hvd-view tbody tr:nth-child(even) { background: transparent; }
.hvd-view th, .hvd-view td { padding: 2px 8px 2px 0; border: 0; text-align: right; font-weight: 400; vertical-align: middle; white-space: nowrap; }
.hvd-view thead th { color: var(--hvd-faint); padding-bottom: 3px; }
.hvd-view tbody th { text-align: left; }
.hvd-view .hvd-names th { text-align: left; max-width: 240px; overflow: hidden; text-overflow: ellipsis; }
.hvd-view .hvd-names thead th:nth-child(n + 3) { text-align: right; }
.hvd-view .hvd-names td:first-child { width: 18px; text-align: left; }
.hvd-view .hvd-bars { max-width: 460px; }
.hvd-view .hvd-bars td { text-align: left; width: 1%; }
.hvd-view .hvd-bars .hvd-track { width: 99%; }
.hvd-view .hvd-bars th { width: 1%; text-align: left; }
.hvd-bars .hvd-track span { display: block; height: 9px; min-width: 1px; border-radius: 2px; background: var(--hvd-faint); opacity: 0.55; }
.hvd-view .hvd-strong th, .hvd-view .hvd-bars .hvd-strong td { color: var(--hvd-late-text); font-weight: 600; }
.hvd-strong .hvd-track span { background: var(--hvd-late); opacity: 1; }
.hvd-view .hvd-names .hvd-at { text-align: left; }
.hvd-view .hvd-names thead th.hvd-at:nth-child(n + 3) { text-align: left; }
.hvd-scroll { overflow-x: auto; padding: 4px 12px 10px; }
.hvd-view.hvd-ranks th, .hvd-view.hvd-ranks td { text-align: left; padding: 3px 14px 3px 0; }
.hvd-view.hvd-ranks td > div.hvd-faint { max-width: 36ch; min-width: 18ch; white-space: normal; overflow-wrap: anywhere; }
.hvd-view.hvd-ranks .hvd-number, .hvd-view.hvd-ranks thead th:nth-child(n + 6) { text-align: right; }
.hvd-shares { display: inline-flex; width: 110px; height: 10px; border-radius: 3px; overflow: hidden; background: var(--hvd-fill); vertical-align: -1px; }
.hvd-work { background: var(--hvd-work); }
.hvd-wait { background: var(--hvd-wait); }
.hvd-unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
/* Little room: what says most about a tensor stays in sight. */
.hvd-view[data-room="little"] .hvd-names .hvd-at,
.hvd-view[data-room="little"] .hvd-names tr > :nth-last-child(-n + 5) { display: none; }
.hvd-view[data-room="little"] .hvd-names th { max-width: 130px; }

.hvd-charts-view { position: relative; outline-offset: -2px; }
.hvd-charts-bar {
  position: relative;
  display: flex;
  align-items: flex-start;
  gap: 4px 8px;
  padding: 5px 8px 5px 10px;
}
.hvd-chips { display: flex; flex: 1 1 0; flex-wrap: wrap; max-height: 66px; overflow-y: auto; align-items: center; gap: 3px; }
.hvd-chip {
  display: inline-flex;
  align-items: center;
  gap: 5px;
  height: 20px;
  padding: 0 7px;
  border: 1px solid transparent;
  border-radius: 10px;
  background: transparent;
  color: inherit;
  font: inherit;
  font-variant-numeric: tabular-nums;
  cursor: pointer;
}
.hvd-chip:hover { background: var(--hvd-fill); }
.hvd-chip[aria-pressed="true"] { border-color: var(--hvd-faint); background: var(--hvd-fill); font-weight: 600; }
.hvd-line { display: inline-block; width: 14px; height: 0; border-radius: 2px; }
.hvd-choices {
  position: absolute;
  z-index: 7;
  top: 100%;
  right: 8px;
  display: grid;
  gap: 3px;
  max-height: 260px;
  overflow-y: auto;
  padding: 8px 14px 9px 10px;
  border: 1px solid var(--hvd-line);
  border-radius: 6px;
  background: var(--hvd-background);
  box-shadow: 0 4px 18px rgba(0, 0, 0, 0.22);
}
.hvd-choices label { display: flex; align-items: center; gap: 7px; white-space: nowrap; cursor: pointer; }
.hvd-choices input { margin: 0; accent-color: var(--hvd-work); }
.hvd-chart-axis { display: block; width: 100%; }
.hvd-chart-list { position: relative; overflow: hidden auto; scrollbar-width: thin; touch-action: pan-y; }
.hvd-charts .hvd-chart-list { max-height: min(42vh, 360px); }
.hvd-chart { position: relative; display: flex; overflow: hidden; border-top: 1px solid var(--hvd-line); }
.hvd-chart-label { flex: none; padding: 6px 8px 4px 10px; overflow: hidden; line-height: 16px; }
.hvd-chart-title { overflow: hidden; font-weight: 600; text-overflow: ellipsis; white-space: nowrap; }
.hvd-chart-value { white-space: nowrap; }
.hvd-chart-value .hvd-faint { font-size: 11px; }
.hvd-chart-far { display: block; max-width: 100%; margin: 0; padding: 0; border: 0; background: none; font: inherit; font-size: 11px; text-align: left; cursor: pointer; }
.hvd-chart-far:hover { text-decoration: underline; }
.hvd-chart-label { position: relative; }
.hvd-chart-log {
  position: absolute;
  right: 8px;
  bottom: 5px;
  padding: 0 5px;
  border: 1px solid var(--hvd-line);
  border-radius: 4px;
  background: var(--hvd-background);
  color: var(--hvd-faint);
  font: inherit;
  font-size: 10.5px;
  line-height: 15px;
  cursor: pointer;
  opacity: 0;
}
.hvd-chart:hover .hvd-chart-log, .hvd-chart-log:focus-visible, .hvd-chart-log[aria-pressed="true"] { opacity: 1; }
.hvd-chart-log[aria-pressed="true"] { border-color: var(--hvd-work); color: var(--hvd-work); }
.hvd-chart-now { font-size: 13px; }
.hvd-chart-plot { flex: none; overflow: hidden; cursor: crosshair; }
.hvd-chart-plot .uplot, .hvd-chart-plot .u-wrap { position: relative; }
.hvd-chart-plot canvas { display: block; position: relative; width: 100%; height: 100%; transform-origin: 0 0; }
.hvd-chart-plot .u-over, .hvd-chart-plot .u-under { position: absolute; overflow: hidden; }
.hvd-crosshair { position: absolute; z-index: 4; top: 0; left: 0; width: 1px; background: var(--hvd-faint); pointer-events: none; }
.hvd-tip-values { display: grid; gap: 1px; margin-top: 4px; }
.hvd-tip-values > div { display: grid; grid-template-columns: 12px 1fr auto; align-items: center; gap: 4px 6px; }
.hvd-tip-values > .hvd-faint { display: block; padding-left: 18px; }
.hvd-tip-values b { font-weight: 600; text-align: right; }
.hvd-dot { width: 9px; height: 9px; border-radius: 50%; }
`,""]),a.d(t,{},{A:o})},27(e,t,a){var i=a(25),r=a.n(i),d=a(26),o=(a.n(d))()(r());o.push([e.id,`.jp-HvdlabPanel {
  display: flex;
  flex-direction: column;
  min-width: 260px;
  min-height: 140px;
  overflow: hidden;
  background: var(--jp-layout-color0);
  color: var(--jp-ui-font-color1);
}
.jp-HvdlabPanel > [hidden] { display: none !important; }
.jp-HvdlabPanel-timeline { flex: 1 1 0; min-height: 0; overflow: auto; }
.jp-HvdlabPanel-ranks { flex: 0 1 auto; max-height: 45%; overflow: auto; border-top: var(--jp-border-width) solid var(--jp-border-color2); }
.jp-HvdlabPanel .hvd-view {
  border: 0;
  border-radius: 0;
  font-family: var(--jp-ui-font-family);
}
.jp-HvdlabPanel-spoken { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.jp-HvdlabPanel-empty {
  margin: auto;
  padding: 20px;
  max-width: 460px;
  text-align: center;
  color: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size1);
  line-height: 1.6;
  outline: none;
}
.jp-HvdlabPanel-emptyTitle { color: var(--jp-ui-font-color1); font-size: var(--jp-ui-font-size2); font-weight: 600; }
.jp-HvdlabPanel-empty pre {
  display: inline-block;
  margin: 12px 0 0;
  padding: 8px 14px;
  border: var(--jp-border-width) solid var(--jp-cell-editor-border-color);
  border-radius: var(--jp-border-radius);
  background: var(--jp-cell-editor-background);
  color: var(--jp-content-font-color1);
  font-family: var(--jp-code-font-family);
  font-size: var(--jp-code-font-size);
  line-height: var(--jp-code-line-height);
  text-align: left;
}
/* That area would be as high as a terminal with some lines. */
.jp-HvdlabTimeline.jp-mod-down > .jp-HvdlabPanel { min-height: 340px; }
.jp-HvdlabTimeline > .jp-Toolbar { align-items: center; }
.jp-HvdlabPanel-source { display: flex; align-items: center; padding: 0 4px; }
.jp-HvdlabPanel-source select {
  height: 24px;
  max-width: 320px;
  padding: 0 4px;
  border: var(--jp-border-width) solid var(--jp-border-color1);
  border-radius: var(--jp-border-radius);
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-family: var(--jp-ui-font-family);
  font-size: var(--jp-ui-font-size1);
}
.jp-HvdlabPanel-source select:focus-visible { outline: 2px solid var(--jp-brand-color1); outline-offset: -1px; }
.jp-HvdlabPanel-heading {
  padding: 0 8px;
  color: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size1);
  font-variant-numeric: tabular-nums;
  line-height: 24px;
  white-space: nowrap;
}
.jp-HvdlabStatus { cursor: pointer; }
.jp-HvdlabStatus .jp-StatusBar-TextItem { font-variant-numeric: tabular-nums; }
.jp-HvdlabStatus .jp-HvdlabStatus-lost { color: var(--jp-warn-color0, #a84300); font-weight: 600; }
/* JupyterLab begins text a character to the right of HTML, and tables have a padding of their own. */
.jp-OutputArea-output :is(.hvd-output, .hvd-still) { padding-left: calc(0.6 * var(--jp-code-font-size)); }
.jp-OutputArea-output :is(.hvd-output, .hvd-still) :is(.hvd-output, .hvd-still) { padding-left: 0; }
.jp-OutputArea-output :is(.hvd-output, .hvd-still) > table { margin-left: -0.5em; }
/* A bold word in the last line is higher than the line, by a part of a pixel that gave the whole text a scrollbar. */
.jp-OutputArea-output.jp-RenderedText pre:has(.ansi-bold) { padding-bottom: 1px; }
/* Where no kernel has a view's model, its still picture has all that there is to see, and ipywidgets' message nothing. */
.jp-OutputArea-child:has(.hvd-still) + .jp-OutputArea-child .jp-OutputArea-output.jupyter-widgets:not(:has(*)) { display: none; }
`,""]),a.d(t,{},{A:o})},26(e){e.exports=function(e){var t=[];return t.toString=function(){return this.map(function(t){var a="",i=void 0!==t[5];return t[4]&&(a+="@supports (".concat(t[4],") {")),t[2]&&(a+="@media ".concat(t[2]," {")),i&&(a+="@layer".concat(t[5].length>0?" ".concat(t[5]):""," {")),a+=e(t),i&&(a+="}"),t[2]&&(a+="}"),t[4]&&(a+="}"),a}).join("")},t.i=function(e,a,i,r,d){"string"==typeof e&&(e=[[null,e,void 0]]);var o={};if(i)for(var n=0;n<this.length;n++){var h=this[n][0];null!=h&&(o[h]=!0)}for(var l=0;l<e.length;l++){var p=[].concat(e[l]);i&&o[p[0]]||(void 0!==d&&(void 0===p[5]||(p[1]="@layer".concat(p[5].length>0?" ".concat(p[5]):""," {").concat(p[1],"}")),p[5]=d),a&&(p[2]&&(p[1]="@media ".concat(p[2]," {").concat(p[1],"}")),p[2]=a),r&&(p[4]?(p[1]="@supports (".concat(p[4],") {").concat(p[1],"}"),p[4]=r):p[4]="".concat(r)),t.push(p))}},t}},25(e){e.exports=function(e){return e[1]}},18(e){var t=[];function a(e){for(var a=-1,i=0;i<t.length;i++)if(t[i].identifier===e){a=i;break}return a}function i(e,i){for(var r={},d=[],o=0;o<e.length;o++){var n=e[o],h=i.base?n[0]+i.base:n[0],l=r[h]||0,p="".concat(h," ").concat(l);r[h]=l+1;var v=a(p),s={css:n[1],media:n[2],sourceMap:n[3],supports:n[4],layer:n[5]};if(-1!==v)t[v].references++,t[v].updater(s);else{var c=function(e,t){var a=t.domAPI(t);return a.update(e),function(t){t?(t.css!==e.css||t.media!==e.media||t.sourceMap!==e.sourceMap||t.supports!==e.supports||t.layer!==e.layer)&&a.update(e=t):a.remove()}}(s,i);i.byIndex=o,t.splice(o,0,{identifier:p,updater:c,references:1})}d.push(p)}return d}e.exports=function(e,r){var d=i(e=e||[],r=r||{});return function(e){e=e||[];for(var o=0;o<d.length;o++){var n=a(d[o]);t[n].references--}for(var h=i(e,r),l=0;l<d.length;l++){var p=a(d[l]);0===t[p].references&&(t[p].updater(),t.splice(p,1))}d=h}}},20(e){var t={};e.exports=function(e,a){var i=function(e){if(void 0===t[e]){var a=document.querySelector(e);if(window.HTMLIFrameElement&&a instanceof window.HTMLIFrameElement)try{a=a.contentDocument.head}catch(e){a=null}t[e]=a}return t[e]}(e);if(!i)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");i.appendChild(a)}},22(e){e.exports=function(e){var t=document.createElement("style");return e.setAttributes(t,e.attributes),e.insert(t,e.options),t}},21(e,t,a){e.exports=function(e){var t=a.nc;t&&e.setAttribute("nonce",t)}},19(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var t=e.insertStyleElement(e);return{update:function(a){var i,r,d;i="",a.supports&&(i+="@supports (".concat(a.supports,") {")),a.media&&(i+="@media ".concat(a.media," {")),(r=void 0!==a.layer)&&(i+="@layer".concat(a.layer.length>0?" ".concat(a.layer):""," {")),i+=a.css,r&&(i+="}"),a.media&&(i+="}"),a.supports&&(i+="}"),(d=a.sourceMap)&&"u">typeof btoa&&(i+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(d))))," */")),e.styleTagTransform(i,t,e.options)},remove:function(){var e;null===(e=t).parentNode||e.parentNode.removeChild(e)}}}},23(e){e.exports=function(e,t){if(t.styleSheet)t.styleSheet.cssText=e;else{for(;t.firstChild;)t.removeChild(t.firstChild);t.appendChild(document.createTextNode(e))}}},17(e,t,a){var i=a(18),r=a.n(i),d=a(19),o=a.n(d),n=a(20),h=a.n(n),l=a(21),p=a.n(l),v=a(22),s=a.n(v),c=a(23),u=a.n(c),x=a(24),f={};f.styleTagTransform=u(),f.setAttributes=p(),f.insert=h().bind(null,"head"),f.domAPI=o(),f.insertStyleElement=s(),r()(x.A,f),x.A&&x.A.locals&&x.A.locals;var g=a(27),b={};b.styleTagTransform=u(),b.setAttributes=p(),b.insert=h().bind(null,"head"),b.domAPI=o(),b.insertStyleElement=s(),r()(g.A,b),g.A&&g.A.locals&&g.A.locals}}]);