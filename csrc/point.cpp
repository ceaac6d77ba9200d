#include "point.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace tl::points {

namespace {

struct Planned {
  std::string name;
  int signal;
  unsigned long left;  // times that it is passed before; 0: it has happened
};

std::mutex mutex;
std::vector<Planned> planned;
std::string from_environment;

Planned parse(const std::string& item) {
  const size_t colon = item.find(':'), at = item.find('@', colon == std::string::npos ? 0 : colon);
  const std::string act = colon == std::string::npos ? "" : item.substr(colon + 1, at == std::string::npos ? at : at - colon - 1);
  const unsigned long count = at == std::string::npos ? 1 : std::strtoul(item.c_str() + at + 1, nullptr, 10);
  if (colon == 0 || count == 0 || (act != "kill" && act != "stop")) throw std::invalid_argument("a point is NAME:kill@N or NAME:stop@N, not " + item);
  return {item.substr(0, colon), act == "kill" ? SIGKILL : SIGSTOP, count};
}

}  // namespace

std::atomic<bool> armed{false};

void arm(const std::string& plan) {
  std::vector<Planned> items;
  std::istringstream text(plan);
  for (std::string item; std::getline(text, item, ',');) items.push_back(parse(item));
  std::lock_guard lock(mutex);
  planned = std::move(items);
  armed.store(!planned.empty(), std::memory_order_relaxed);
}

void arm_from_environment() {
  const char* value = std::getenv("TENSORLINK_TEST_POINT");
  const std::string plan = value ? value : "";
  {
    std::lock_guard lock(mutex);
    if (plan == from_environment) return;
    from_environment = plan;
  }
  arm(plan);
}

void reached(std::string_view what, std::string_view phase) {
  const std::string name = std::string(what) + '.' + std::string(phase);
  std::lock_guard lock(mutex);  // also while it happens: who has disarmed a point must be sure that nobody is about to come there
  for (Planned& point : planned)
    if (point.left && point.name == name && --point.left == 0) ::kill(::getpid(), point.signal);
}

}  // namespace tl::points
