// Sessions of agents: the parts that serve them, how they ended, and why their conversations forked.
import {h} from './dom.js';
import {box} from './loop.js';

const PARTS = new Set(['gateway', 'assembler']);

export function draw(place, view) {
  place.hidden = !view.sessions.length;
  if (place.hidden) return;
  const ends = [...new Set(view.sessions.flatMap(env => Object.keys(env.ends)))];
  place.replaceChildren(h('h2', {}, 'Sessions of agents'), h('div', {class: 'sessions'},
    view.loop.filter(node => PARTS.has(node.role)).map(box),
    h('div', {}, view.sessions.map(env => ended(env, ends)), legend(view.sessions, ends), forks(view.sessions))));
}

const sum = counts => Object.values(counts).reduce((a, b) => a + b, 0);
const colour = index => `k${index % 8}`;

function ended(env, names) {
  const count = sum(env.ends);
  return h('div', {class: 'fate-row'},
    h('div', {class: 'who'}, h('span', {}, env.env), h('span', {class: 'dim'}, `${count.toLocaleString('en-US')} ended`)),
    h('div', {class: 'share'}, names.map((name, index) => env.ends[name] &&
      h('span', {class: `fillk ${colour(index)}`, title: `${name}: ${env.ends[name]}`, style: {flex: env.ends[name]}}))));
}

function legend(envs, names) {
  return h('div', {class: 'legend'}, names.map((name, index) => h('span', {}, h('i', {class: colour(index)}), `${name} `,
    h('b', {}, envs.reduce((all, env) => all + (env.ends[name] ?? 0), 0).toLocaleString('en-US')))));
}

function forks(envs) {
  const causes = new Map();
  for (const env of envs) for (const [cause, count] of Object.entries(env.forks)) causes.set(cause, (causes.get(cause) ?? 0) + count);
  return h('div', {class: 'legend forks'}, h('span', {}, causes.size ? 'forks of a conversation by cause:' : 'no conversation has forked'),
    [...causes].map(([cause, count]) => h('span', {}, `${cause} `, h('b', {}, count.toLocaleString('en-US')))));
}
