// SPDX-License-Identifier: Apache-2.0
// Policy-gradient learning with actors that are killed at random and restarted under their names.
// The learner starts the actors as processes and hands out episodes; an episode that an actor did
// not finish is given to another actor. An episode depends only on its number, so the learner
// computes the same policy whichever actors are killed, and the reward rises.
//
//   lost_actors
#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <spawn.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/torch.h>

#include <weft/weft.h>

#include "../common/cart_pole.h"
#include "../common/options.h"

namespace {

constexpr int kMostSteps = 200;  // steps of an episode
constexpr int kEpisodes = 8;     // episodes for one step of the optimizer
constexpr double kDiscount = 0.99;
// Environment variables of the processes that the learner starts.
constexpr const char* kName = "LOST_ACTORS_NAME";
constexpr const char* kAddress = "LOST_ACTORS_ADDRESS";

torch::nn::Sequential make_policy() {
  return torch::nn::Sequential(torch::nn::Linear(4, 32), torch::nn::Tanh(),
                               torch::nn::Linear(32, 2));
}

struct Episode {
  at::Tensor states;   // [steps, 4]
  at::Tensor actions;  // [steps]
  int steps() const { return static_cast<int>(actions.size(0)); }
  WEFT_FIELDS(states, actions)
};

// --- an actor

Episode play(std::vector<at::Tensor> weights, int number) {
  const torch::NoGradGuard no_grad;
  auto policy = make_policy();
  const auto own = policy->parameters();
  for (std::size_t i = 0; i < own.size(); ++i) own[i].copy_(weights.at(i));
  examples::CartPole world(static_cast<unsigned>(number));
  std::mt19937 random(static_cast<unsigned>(number));
  std::uniform_real_distribution<double> chance;
  std::vector<at::Tensor> states;
  std::vector<std::int64_t> actions;
  auto state = world.reset();
  for (bool stands = true; stands && actions.size() < kMostSteps; state = world.state()) {
    states.push_back(torch::tensor(state));
    const double right = torch::softmax(policy->forward(states.back()), 0)[1].item<double>();
    actions.push_back(chance(random) < right ? 1 : 0);
    stands = world.push(actions.back() == 1);
  }
  return {torch::stack(states), torch::tensor(actions)};
}

std::mutex mutex;
std::condition_variable changed;
bool is_over = false;

void finish() {
  std::lock_guard lock(mutex);
  is_over = true;
  changed.notify_all();
}

void act(const std::string& name, const std::string& address) {
  auto agent = weft::rpc::init(name, {.init_method = address});  // takes a free rank
  std::unique_lock lock(mutex);
  changed.wait(lock, [] { return is_over; });
  lock.unlock();
  agent.shutdown();
}

// --- the learner

// A port that is free. As long as this lives, the kernel gives it to no connection of another
// program; the agent may listen there, because both set SO_REUSEADDR.
class FreePort {
 public:
  FreePort() {
    const int yes = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    if (::setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
        ::bind(socket_, reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
        ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
      throw std::runtime_error("no port is free");
    }
    number_ = ntohs(address.sin_port);
  }
  ~FreePort() { ::close(socket_); }
  FreePort(const FreePort&) = delete;
  FreePort& operator=(const FreePort&) = delete;
  int number() const { return number_; }

 private:
  const int socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int number_ = 0;
};

// The actors' processes. The destructor kills those that still run.
class Processes {
 public:
  explicit Processes(std::string address) : address_(std::move(address)) {}
  ~Processes() {
    for (const auto& [name, process] : running_) ::kill(process, SIGKILL);
    for (const auto& [name, process] : running_) ::waitpid(process, nullptr, 0);
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  void start(const std::string& name) {
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<std::string> variables{kName + ("=" + name), kAddress + ("=" + address_)};
    for (char** variable = environ; *variable != nullptr; ++variable)
      variables.emplace_back(*variable);
    std::vector<char*> environment;
    for (auto& variable : variables) environment.push_back(variable.data());
    environment.push_back(nullptr);
    std::vector<char*> arguments{const_cast<char*>(program.c_str()), nullptr};
    pid_t process = 0;
    if (::posix_spawn(&process, program.c_str(), nullptr, nullptr, arguments.data(),
                      environment.data()) != 0) {
      throw std::runtime_error(program + " cannot be started");
    }
    running_[name] = process;
  }
  void kill(const std::string& name) {
    ::kill(running_.at(name), SIGKILL);
    wait(name);
  }
  void wait(const std::string& name) {
    ::waitpid(running_.at(name), nullptr, 0);
    running_.erase(name);
  }

 private:
  const std::string address_;
  std::map<std::string, pid_t> running_;
};

// An event that the learner handles; events of all threads are handled in one order.
struct Event {
  std::string actor;
  enum { Joined, Lost, Played } what = Joined;
  int number = 0;  // number of the actor's episode
  std::optional<Episode> episode;
};

class Learner {
 public:
  Learner(weft::rpc::Agent& agent, Processes& processes, int actors, double kills, int seed)
      : agent_(agent),
        processes_(processes),
        kills_(kills),
        random_(static_cast<unsigned>(seed)),
        policy_(make_policy()),
        optimizer_(policy_->parameters(), torch::optim::AdamOptions(1e-2)) {
    agent.on_worker_joined([this](const weft::rpc::WorkerInfo& worker) {
      post({worker.name, Event::Joined, 0, {}});
    });
    agent.on_worker_lost([this](const weft::rpc::WorkerInfo& worker, const weft::Error&) {
      post({worker.name, Event::Lost, 0, {}});
    });
    for (int actor = 1; actor <= actors; ++actor) {
      names_.push_back("actor" + std::to_string(actor));
      processes.start(names_.back());
    }
  }

  // Runs one step of the optimizer; returns the mean reward of its episodes.
  double step(int first) {
    std::deque<int> to_play;
    for (int i = 0; i < kEpisodes; ++i) to_play.push_back(first + i);
    std::map<int, Episode> played;
    std::vector<at::Tensor> weights;
    for (const auto& one : policy_->parameters()) weights.push_back(one.detach().clone());
    while (played.size() < kEpisodes) {
      for (const auto& name : names_) {
        if (to_play.empty() || !idle_.contains(name)) continue;
        give(name, to_play.front(), weights);
        to_play.pop_front();
      }
      Event event = next();
      if (event.what == Event::Joined) {
        idle_.insert(event.actor);
      } else if (event.what == Event::Lost) {
        ++lost_;
        idle_.erase(event.actor);
      } else if (event.episode) {
        idle_.insert(event.actor);
        played.emplace(event.number, *std::move(event.episode));
      } else {
        to_play.push_front(event.number);
      }
    }
    return learn(played);
  }

  void end() {
    while (idle_.size() < names_.size()) {  // also waits for actors that have just been started
      const Event event = next();
      if (event.what == Event::Joined) idle_.insert(event.actor);
      if (event.what == Event::Lost) ++lost_;
    }
    for (const auto& name : names_) agent_.sync<&finish>(name);
    for (const auto& name : names_) processes_.wait(name);
  }
  int killed() const { return killed_; }
  int lost() const { return lost_; }

 private:
  void give(const std::string& name, int number, const std::vector<at::Tensor>& weights) {
    idle_.erase(name);
    try {
      agent_.async<&play>(name, weights, number)
          .on_done([this, name, number](const weft::Future<Episode>& played) {
            std::optional<Episode> episode;
            if (!played.failed()) episode = played.get();
            post({name, Event::Played, number, std::move(episode)});
          });
    } catch (const weft::Error& error) {
      if (error.blame() != weft::Blame::PeerLost) throw;
      post({name, Event::Played, number, {}});  // the actor is known to be lost
    }
    if (std::uniform_real_distribution<double>()(random_) >= kills_) return;
    processes_.kill(name);
    ++killed_;
    processes_.start(name);
  }

  double learn(const std::map<int, Episode>& played) {
    std::vector<at::Tensor> chosen;
    std::vector<float> returns;
    double reward = 0;
    for (const auto& [number, episode] : played) {
      const auto logs = torch::log_softmax(policy_->forward(episode.states), 1);
      chosen.push_back(logs.gather(1, episode.actions.unsqueeze(1)).squeeze(1));
      double future = 0;
      std::vector<float> own(static_cast<std::size_t>(episode.steps()));
      for (std::size_t i = own.size(); i-- > 0;)
        own[i] = static_cast<float>(future = 1 + kDiscount * future);
      returns.insert(returns.end(), own.begin(), own.end());
      reward += episode.steps() / static_cast<double>(kEpisodes);
    }
    auto worth = torch::tensor(returns);
    worth = (worth - worth.mean()) / (worth.std() + 1e-6);
    optimizer_.zero_grad();
    (-(torch::cat(chosen) * worth).mean()).backward();
    optimizer_.step();
    return reward;
  }

  void post(Event event) {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    changed_.notify_one();
  }
  Event next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !events_.empty(); });
    Event event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

  weft::rpc::Agent& agent_;
  Processes& processes_;
  const double kills_;  // probability for each episode that its actor is killed
  std::mt19937 random_;
  torch::nn::Sequential policy_;
  torch::optim::Adam optimizer_;
  std::vector<std::string> names_;
  std::set<std::string> idle_;
  int killed_ = 0;
  int lost_ = 0;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<Event> events_;
};

struct Wanted {
  int actors = 4;
  int updates = 150;
  double goal = 120;
  double kills = 0.03;
  int seed = 1;
};

void learn(const Wanted& wanted) {
  torch::manual_seed(static_cast<std::uint64_t>(wanted.seed));
  const FreePort port;
  const std::string address = "tcp://127.0.0.1:" + std::to_string(port.number());
  // Rank 0 hosts the store at which the others meet.
  auto agent = weft::rpc::init("learner", {.rank = 0, .init_method = address});
  Processes processes(address);
  Learner learner(agent, processes, wanted.actors, wanted.kills, wanted.seed);
  double mean = 0;
  int update = 0;
  while (mean < wanted.goal) {
    if (++update > wanted.updates)
      throw std::runtime_error("the mean reward reached " + std::to_string(mean) +
                               ", below the goal");
    const double reward = learner.step(update * kEpisodes);
    mean = update == 1 ? reward : 0.9 * mean + 0.1 * reward;
    if (update % 10 == 0 || mean >= wanted.goal) {
      std::printf("update %3d: mean reward %5.1f, %d actors were killed\n", update, mean,
                  learner.killed());
      std::fflush(stdout);
    }
  }
  learner.end();
  std::printf(
      "solved: mean reward %.1f after %d updates; %d actors were killed and came back, %d losses "
      "were reported\n",
      mean, update, learner.killed(), learner.lost());
  agent.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  Wanted wanted;
  examples::Options options(
      "lost_actors", "A policy is learnt from actors that are killed at random and come back", 1);
  options.add("--actors", wanted.actors, "Processes that play", examples::count_from(1));
  options.add("--updates", wanted.updates, "Maximum number of optimizer steps",
              examples::count_from(1));
  options.add("--goal", wanted.goal, "Mean reward at which it ends", examples::positive_number());
  options.add("--kills", wanted.kills, "Probability for each episode that its actor is killed",
              examples::share());
  options.add("--seed", wanted.seed, "Seed of the kills and of the policy",
              examples::count_from(1));
  options.parse(argc, argv);
  // Ignores a launcher's variables, because workers join and leave here.
  for (const char* variable : {"RANK", "WORLD_SIZE"}) ::unsetenv(variable);
  try {
    torch::set_num_threads(1);
    const char* const name = std::getenv(kName);
    const char* const address = std::getenv(kAddress);
    name != nullptr&& address != nullptr ? act(name, address) : learn(wanted);
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "lost_actors: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lost_actors: %s\n", error.what());
  }
  return 1;
}
