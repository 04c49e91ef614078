// The page: it listens for what the run is at, or shows the step that the slider is at. One function draws both.
import * as charts from './charts.js';
import * as loop from './loop.js';
import * as rollouts from './rollouts.js';
import * as sessions from './sessions.js';
import {ago, byId, clock, h, known, percent, short, whole} from './dom.js';

const PLAY_MS = 350, PLAY_STEPS = 120;  // a step of the replay; a long run is played in about so many
const WIDE = new Set(['Reward']);
let live = null;      // the newest overview that was sent
let shown = null;     // the one that is drawn
let pinned = null;    // the step that is looked at; null: as it is
let playing = null, rewire = () => {}, forget = [], asked = 0;

// ---- drawing ----
function draw(view) {
  shown = view;
  document.title = `${view.run} · step ${view.step}`;
  byId('run').textContent = view.run;
  status();
  tiles(view);
  rewire = loop.draw(byId('loop'), view.loop);
  panels(view);
  const {envs, ages, bars} = view.composition;
  charts.bars(byId('by-env'), envs, bars, 'env', charts.layer);
  charts.bars(byId('by-age'), ages.map(age => `${age} version${age === 1 ? '' : 's'}`), bars, 'age', index => charts.ramp(index, ages.length));
  charts.fates(byId('fates'), view.fates, view.fate_names);
  sessions.draw(byId('sessions'), view);
  rollouts.choices(view.envs, view.fate_names, live.newest);
}

function status() {
  const pill = byId('status'), reading = live.read < 1;
  pill.className = `pill${reading ? ' busy' : live.live ? ' on' : ''}`;
  pill.textContent = reading ? `reading ${Math.floor(100 * live.read)} %` : live.live ? 'running' : known(live.heard_s_ago) ? `stopped ${ago(live.heard_s_ago)}` : 'never started';
  const slider = byId('slider');
  slider.min = live.first;
  slider.max = Math.max(live.newest, live.first);
  slider.value = pinned ?? live.newest;
  slider.disabled = live.newest < 0;
  byId('step').textContent = live.newest < 0 ? 'no version yet' : `step ${pinned ?? live.newest} of ${live.max_steps || live.newest}`;
  byId('live').className = `pill${pinned === null ? ' on' : ''}`;
  byId('live').textContent = live.live ? 'live' : 'latest';
}

function tiles(view) {
  const {figures} = view, rate = view.loop.filter(node => node.role === 'env').reduce((sum, node) => sum + (node.rate ?? 0), 0);
  const lasts = known(view.started_s) && view.time_s > 0 ? view.time_s - view.started_s : null;
  const all = [
    ['step', whole(Math.max(view.step, 0)), view.max_steps ? `of ${view.max_steps}` : ''],
    ...rewards(view),
    ['rollouts', short(figures.rollouts), rate ? `${short(rate)}/s` : ''],
    ['age at training', short(figures.age_mean), 'versions'],
    known(figures.expired_token_share) ? ['expired', percent(figures.expired_token_share), 'of tokens'] : ['expired', percent(figures.expired_share), ''],
    ['running for', clock(lasts), ''],
  ];
  byId('tiles').replaceChildren(...all.map(([label, value, more]) => h('div', {class: 'tile'}, h('div', {class: 'label', title: label}, label), h('div', {class: 'value'}, value, ' ', h('small', {}, more)))));
}

const MOST_REWARDS = 3;  // in tiles; of more envs the target's, and the mean of all

function rewards({figures, target}) {
  const all = Object.entries(figures.rewards).filter(([, reward]) => known(reward));
  const tile = ([env, reward]) => [`reward · ${env}`, short(reward), target?.env === env ? `of ${target.reward}` : ''];
  if (all.length <= MOST_REWARDS) return all.map(tile);
  const mean = all.reduce((sum, [, reward]) => sum + reward, 0) / all.length;
  return [...all.filter(([env]) => env === target?.env).map(tile), [`reward · mean of ${all.length} envs`, short(mean), '']];
}

function panels(view) {
  const place = byId('panels');
  if (pinned === null && place.matches(':hover') && place.children.length === view.panels.length) return;  // the reader is reading off a value
  forget.forEach(done => done());
  while (place.children.length > view.panels.length) place.lastChild.remove();
  while (place.children.length < view.panels.length) place.append(h('section', {class: 'card'}));
  forget = view.panels.map((panel, index) => {
    const card = place.children[index];
    card.classList.toggle('wide', WIDE.has(panel.title));
    const goal = panel.title === 'Reward' ? view.target?.reward : null;
    if (!panel.series.length) { card.replaceChildren(h('h2', {}, panel.title), h('p', {class: 'empty'}, 'nothing yet')); return () => {}; }
    return charts.curves(card, panel, [view.first, Math.max(live.newest, 1)], goal, pin);
  });
}

// ---- replay ----
async function pin(step) {
  pinned = step === null ? null : Math.min(Math.max(step, live.first), live.newest);
  status();
  const mine = ++asked;
  if (pinned === null) draw(live);
  else {
    const view = await (await fetch(`/api/overview?step=${pinned}`)).json();
    if (mine !== asked) return;  // the slider is elsewhere by now
    draw(view);
  }
  await rollouts.list(pinned);
}

function stop() {
  clearTimeout(playing);
  playing = null;
  byId('play').textContent = '▶';
}

async function play() {
  const by = Math.max(1, Math.round((live.newest - live.first) / PLAY_STEPS));
  const next = pinned === null || pinned >= live.newest ? live.first : pinned + by;
  await pin(next);
  if (playing === null) return;
  if (pinned >= live.newest) return stop();
  playing = setTimeout(play, PLAY_MS);
}

byId('slider').addEventListener('input', event => { stop(); pin(Number(event.target.value)); });
byId('live').addEventListener('click', () => { stop(); pin(null); });
byId('play').addEventListener('click', () => {
  if (playing !== null) return stop();
  byId('play').textContent = '❚❚';
  playing = 0;
  play();
});

// ---- colours ----
const themes = ['system', 'light', 'dark'], system = matchMedia('(prefers-color-scheme: dark)');
function paint() {
  const chosen = localStorage.getItem('theme') ?? 'system';
  document.documentElement.dataset.theme = chosen === 'system' ? system.matches ? 'dark' : 'light' : chosen;
  byId('theme').textContent = {system: '◐ auto', light: '☀ light', dark: '☾ dark'}[chosen];
}
byId('theme').addEventListener('click', () => {
  localStorage.setItem('theme', themes[(themes.indexOf(localStorage.getItem('theme') ?? 'system') + 1) % 3]);
  paint();
});
system.addEventListener('change', paint);
paint();

// ---- the run, live ----
let listed = 0;
function take(view) {
  live = view;
  if (pinned !== null) return status();
  draw(view);
  if (rollouts.following() && Date.now() - listed > 2000) { listed = Date.now(); rollouts.list(null); }
}

rollouts.init(() => rollouts.list(pinned));
const events = new EventSource('/api/events');
events.addEventListener('overview', event => { const first = live === null; take(JSON.parse(event.data)); if (first) rollouts.fromAddress(); });
events.addEventListener('error', () => { const pill = byId('status'); pill.className = 'pill busy'; pill.textContent = 'the dashboard does not answer'; });
let resized = null;
addEventListener('resize', () => { clearTimeout(resized); resized = setTimeout(() => shown && draw(shown), 120); });
