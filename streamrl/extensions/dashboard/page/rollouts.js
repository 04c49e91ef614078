// The browser of rollouts: filters and pages are the server's work; one rollout with its tokens.
import {byId, h, known, percent, short, versions, whole} from './dom.js';

const AT_ONCE = 4000;  // tokens drawn before one has to ask for more
const form = byId('filters'), dialog = byId('detail');
let page = 0, pinned = null, asked = 0, mode = 'logprob', newest = -1;

export function init(refresh) {
  form.addEventListener('input', () => { page = 0; refresh(); });
  form.addEventListener('reset', () => setTimeout(() => { page = 0; refresh(); }));
  form.addEventListener('submit', event => event.preventDefault());
  byId('before').addEventListener('click', () => { page = Math.max(0, page - 1); refresh(); });
  byId('after').addEventListener('click', () => { page += 1; refresh(); });
  dialog.addEventListener('click', event => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener('close', () => history.replaceState(null, '', location.pathname));
}

export function choices(envs, fates, version) {
  newest = version;
  for (const [name, values] of [['env', envs], ['fate', fates]]) {
    const select = form.elements[name], there = [...select.options].map(option => option.value);
    if (there.join() === ['', ...values].join()) continue;
    const chosen = select.value;
    select.replaceChildren(h('option', {value: ''}, 'all'), ...values.map(value => h('option', {value}, value)));
    select.value = values.includes(chosen) ? chosen : '';
  }
}

/** True where the page follows the run: nothing is being read further back. */
export const following = () => page === 0 && !dialog.open && !byId('rows').contains(document.activeElement);

export async function list(step) {
  pinned = step;
  const mine = ++asked, query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value.trim()).map(([name, value]) => [name, value.trim()]));
  query.set('page', page);
  if (known(step)) query.set('step', step);
  const answer = await fetch(`/api/rollouts?${query}`), found = await answer.json();
  if (mine !== asked) return;
  if (!answer.ok) return void (byId('found').textContent = found.error);
  const mean = known(found.reward_mean) ? `, mean reward ${short(found.reward_mean)}` : '';
  byId('found').textContent = `${whole(found.total)}${mean}${found.forgotten ? `, of the newest ${whole(found.kept)}: ${whole(found.forgotten)} older ones are no longer held here` : ''}`;
  byId('page').textContent = `page ${found.page + 1} of ${whole(found.pages)}`;
  byId('before').disabled = found.page === 0;
  byId('after').disabled = found.page + 1 >= found.pages;
  byId('rows').replaceChildren(...(found.rows.length ? found.rows.map(line) : [h('tr', {}, h('td', {colspan: 8, class: 'empty'}, 'no rollout like that'))]));
}

function line(row) {
  const look = () => show(row.env, row.partition, row.offset);
  return h('tr', {tabindex: 0, onclick: look, onkeydown: event => { if (event.key === 'Enter') look(); }, 'data-place': `${row.env}/${row.partition}/${row.offset}`},
    h('td', {class: 'c-time dim'}, new Date(row.time_s * 1000).toLocaleTimeString([], {hour12: false})), h('td', {class: 'c-env'}, row.env), h('td', {class: 'c-uid mono', title: row.uid}, row.uid),
    h('td', {}, versions(row.oldest, row.newest)),
    h('td', {}, h('span', {class: 'gauge'}, h('i', {style: {width: `${100 * Math.min(1, Math.max(0, row.reward ?? 0))}%`}})), short(row.reward)),
    h('td', {class: 'num c-tokens'}, whole(row.tokens)), h('td', {class: 'c-fate'}, fate(row.fate)), h('td', {class: 'num c-batch'}, known(row.batch) ? row.batch : ''));
}

const fate = name => h('span', {class: 'fate'}, h('i', {class: `fate-mark fate-${name.replace(' ', '-')}`}), name);

// ---- one rollout ----
export async function show(env, partition, offset) {
  history.replaceState(null, '', `#${encodeURIComponent(env)}/${partition}/${offset}`);
  if (!dialog.open) dialog.showModal();
  dialog.replaceChildren(h('div', {class: 'sheet'}, h('div', {class: 'body'}, h('p', {class: 'dim'}, 'reading …'))));
  const query = known(pinned) ? `?step=${pinned}` : '';
  const answer = await fetch(`/api/rollouts/${encodeURIComponent(env)}/${partition}/${offset}${query}`);
  draw(await answer.json());
}

function draw(found) {
  const close = h('button', {class: 'quiet', onclick: () => dialog.close(), 'aria-label': 'Close'}, '✕');
  const probe = h('div', {class: 'probe'}, 'Point at a token.');
  const body = h('div', {class: 'body'});
  dialog.replaceChildren(h('div', {class: 'sheet'}, h('header', {}, h('h3', {class: 'mono'}, found.uid ?? 'rollout'), close), body, found.turns ? probe : null));
  if (known(found.uid)) body.append(story(found));
  if (found.error) body.append(h('p', {class: 'error'}, found.error));
  if (!found.turns) return;
  if (found.failure) body.append(h('p', {class: 'error'}, `failed: ${found.failure}`));
  if (found.misaligned) body.append(h('p', {class: 'error'}, `misaligned: ${found.misaligned}`));
  body.append(h('dl', {class: 'facts'}, facts(found).flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])));
  const turns = found.turns.map(turn => turnOf(turn, found));
  body.append(modes(found, () => turns.forEach(turn => turn.paint())), ...turns.map(turn => turn.element));
  body.addEventListener('pointerover', event => explain(event.target, probe));
  body.addEventListener('click', event => explain(event.target, probe));
}

function story(found) {
  const batch = known(found.batch) ? ['It is in ', narrowed(`batch ${found.batch}`, {batch: found.batch}), trainedOn(found.batch)]
    : found.fate === 'in flight' ? ['No batch has it yet.'] : ['Nothing was trained on it.'];
  return h('p', {class: 'story'}, fate(found.fate), ' · reward ', h('b', {}, short(found.reward)), ` · ${whole(found.turns?.length ?? 0)} turns, ${whole(found.tokens)} tokens, ${whole(found.sampled)} sampled by `,
    h('b', {}, versions(found.oldest, found.newest)), '. ', ...batch, ' Its group is ', narrowed(found.group, {group: found.group}), '.');
}

const trainedOn = batch => batch < newest ? `, which version ${batch} was trained on to give version ${batch + 1}.` : ', which is still to be trained on.';

function narrowed(text, filters) {
  return h('button', {class: 'link', onclick: () => {
    form.reset();
    for (const [name, value] of Object.entries(filters)) form.elements[name].value = value;
    dialog.close();
    setTimeout(() => { page = 0; form.dispatchEvent(new Event('input')); byId('rollouts').scrollIntoView({behavior: 'smooth'}); });
  }}, text);
}

function facts(found) {
  const rewards = Object.entries(found.rewards).map(([name, value]) => `${name} ${short(value)}`).join(', ');
  return [['problem', found.problem], ['rewards', rewards || '–'], ['temperature', short(found.temperature)], ['producer', found.producer],
    ...(found.truncated ? [['truncated', 'by a limit']] : []), ...Object.entries(found.metadata)];
}

const MODES = ['logprob', 'advantage', 'version'];
function modes(found, repaint) {
  const key = h('span', {});
  const labels = {logprob: ['certain ', h('i', {class: 'scale logprob'}), ' surprising'], advantage: ['below ', h('i', {class: 'scale advantage'}), ' above'], version: []};
  const has = {logprob: found.turns.some(turn => turn.logprobs), advantage: found.turns.some(turn => turn.advantages), version: found.turns.some(turn => turn.spans.length)};
  const buttons = MODES.map(name => h('button', {disabled: !has[name], title: has[name] ? null : 'not known of this rollout', onclick: () => choose(name)}, name));
  const made = [...new Set(found.turns.flatMap(turn => turn.spans.map(span => span[0])))].sort((a, b) => a - b);
  function choose(name) {
    mode = name;
    buttons.forEach((button, i) => button.setAttribute('aria-pressed', MODES[i] === mode));
    key.replaceChildren(...(mode === 'version' ? made.map((version, i) => h('span', {class: 'legend'}, h('span', {}, h('i', {class: `k${i % 8}`}), `v${version}`))) : labels[mode].map(part => part.nodeType ? part.cloneNode() : part)));
    found.made = made;
    repaint();
  }
  queueMicrotask(() => choose(has[mode] ? mode : MODES.find(name => has[name]) ?? 'logprob'));
  return h('div', {class: 'modes'}, 'Tokens coloured by', h('span', {class: 'set'}, buttons), key);
}

function turnOf(turn, found) {
  const strongest = Math.max(1e-6, ...found.turns.flatMap(other => other.advantages ?? []).map(Math.abs));
  const text = h('div', {class: 'text'}), spans = [];
  const versionOf = i => turn.spans.find(([, start, end]) => start <= i && i < end)?.[0];
  const dress = (span, i) => {
    let paint = 'transparent', strength = 0;
    if (mode === 'logprob' && turn.logprobs) [paint, strength] = ['var(--hot)', 78 * Math.min(1, -turn.logprobs[i] / 4)];
    if (mode === 'advantage' && turn.advantages) [paint, strength] = [turn.advantages[i] < 0 ? 'var(--hot)' : 'var(--good)', 70 * Math.abs(turn.advantages[i]) / strongest];
    const version = mode === 'version' && turn.logprobs ? versionOf(i) : undefined;
    if (known(version)) [paint, strength] = [`var(--c${(found.made ?? []).indexOf(version) % 8})`, 38];
    span.style.setProperty('--t', paint);
    span.style.setProperty('--x', Math.max(0, strength).toFixed(0));
  };
  const more = () => {
    const start = spans.length, ids = turn.ids.slice(start, start + AT_ONCE);
    for (const [k, id] of ids.entries()) {
      const i = start + k, own = turn.texts?.[i];
      const span = h('span', {class: `tok${known(own) ? '' : ' id'}${/^<[^ ]*>$/.test(own ?? '') ? ' special' : ''}`}, known(own) ? own.replace(/\n/g, '⏎\n') : id);
      span.told = {text: own ?? '', id, logprob: turn.logprobs?.[i], advantage: turn.advantages?.[i], version: turn.logprobs ? versionOf(i) : undefined};
      dress(span, i);
      spans.push(span);
    }
    text.append(...spans.slice(start));
    if (spans.length < turn.ids.length) text.append(h('button', {class: 'link', onclick: event => { event.target.remove(); more(); }}, ` ${whole(turn.ids.length - spans.length)} more tokens`));
    else if (turn.omitted) text.append(h('span', {class: 'dim'}, ` … ${whole(turn.omitted)} more tokens`));
  };
  if (!turn.texts && turn.message) text.append(h('div', {}, turn.message));  // no tokenizer: the words, then the ids
  more();
  const how = [turn.server, turn.finish_reason, known(turn.latency_s) && `${short(turn.latency_s)} s`, known(turn.reward) && `earned ${short(turn.reward)}`,
    ...Object.entries(turn.rewards).map(([name, value]) => `${name} ${short(value)}`), turn.fork && (turn.fork_at ? `branches from sequence ${turn.fork_of} after ${whole(turn.fork_at)} tokens` : 'another sequence begins here')].filter(Boolean);
  const element = h('section', {class: `turn ${turn.logprobs ? 'assistant' : 'given'}`}, h('header', {}, h('b', {}, turn.role), h('span', {}, `${whole(turn.ids.length + turn.omitted)} tokens`), how.map(word => h('span', {}, word))), text);
  return {element, paint: () => spans.forEach(dress)};
}

function explain(target, probe) {
  const told = target.told;
  if (!told) return;
  document.querySelectorAll('.picked').forEach(other => other.classList.remove('picked'));
  target.classList.add('picked');
  const words = [h('b', {}, JSON.stringify(told.text)), ` id ${told.id}`];
  if (known(told.logprob)) words.push(` · logprob ${told.logprob.toFixed(4)} (${percent(Math.exp(told.logprob))})`);
  else words.push(' · given, not sampled');
  if (known(told.advantage)) words.push(` · advantage ${told.advantage.toFixed(4)}`);
  if (known(told.version)) words.push(` · by version ${told.version}`);
  probe.replaceChildren(...words);
}

export function fromAddress() {
  const [env, partition, offset] = decodeURIComponent(location.hash.slice(1)).split('/');
  if (offset) show(env, partition, offset);
}
