// Who reads a claim from whom, when many want it: each reader passes on what it gets, so the owner sends it about once.
//
// Readers of a claim form a chain in the order in which they came. Each reads from the one before it, also while that one
// is still being filled; the first reads from the owner. One that was found dead leaves the chain, and who read from it is
// sent to whoever stands before: never to one behind itself, so no circle can form.
#pragma once
#include <algorithm>
#include <map>
#include <vector>

#include "descriptor.h"
#include "handshake.h"

namespace tl {

struct Hop {
  uint64_t id = 0;
  Identity peer;
  Contact contact;
  Descriptor relay;  // what it has of the claim
};

class Chains {
 public:
  // Where the reader of a claim is to read: null: from the owner itself. The reader joins the chain, unless it is in it already.
  // `failed`: the hop that did not serve it, or 0. `depth`: how many stand between it and the owner.
  const Hop* source(ClaimId claim, Hop reader, uint64_t failed, size_t& depth) {
    std::vector<Hop>& chain = chains_[claim];
    chain.erase(std::remove_if(chain.begin(), chain.end(), [&](const Hop& hop) { return hop.id == failed; }), chain.end());
    if (reader.contact.at.host.empty()) {  // nobody could read from it
      depth = chain.size();
      return chain.empty() ? nullptr : &chain.back();
    }
    auto own = std::find_if(chain.begin(), chain.end(), [&](const Hop& hop) { return hop.peer == reader.peer; });
    if (own == chain.end()) {
      if (chain.size() >= kMost) return depth = 0, nullptr;  // nobody follows it either
      reader.id = ++last_;
      chain.push_back(std::move(reader));
      own = chain.end() - 1;
    } else if (own->relay.claim != reader.relay.claim) {
      own->relay = std::move(reader.relay);
    }
    depth = static_cast<size_t>(own - chain.begin());
    return depth == 0 ? nullptr : &*(own - 1);
  }
  // Nobody is to read from that peer any more.
  void avoid(const Identity& peer) {
    auto it_is = [&](const Hop& hop) { return hop.peer.name == peer.name && hop.peer.incarnation <= peer.incarnation; };
    for (auto& [claim, chain] : chains_) chain.erase(std::remove_if(chain.begin(), chain.end(), it_is), chain.end());
  }
  // Claims that have ended need no chain.
  template <class Stands>
  void sweep(Stands stands) {
    for (auto it = chains_.begin(); it != chains_.end();) it = stands(it->first) ? std::next(it) : chains_.erase(it);
  }

 private:
  static constexpr size_t kMost = 1024;  // peers in a chain; the others read from the owner
  std::map<ClaimId, std::vector<Hop>> chains_;
  uint64_t last_ = 0;
};

}  // namespace tl
