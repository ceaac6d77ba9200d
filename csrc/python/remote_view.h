// An object in the memory of a peer on another host. It is brought into this process when it is first looked at: into
// the tensors it is for, or else into the pool.
#pragma once
#include "python/views.h"

namespace tl::python {

class RemoteView : public View {
 public:
  RemoteView(Engine& engine, const std::shared_ptr<TcpConnection>& connection, Descriptor descriptor);
  ~RemoteView() override;
  bool pass_on() override { return passes_on_ = true; }
  std::string_view meta(std::string_view beside, const Limit& limit) override;
  const std::vector<Extent>& payload(const Limit& limit) override;
  PyObject* unpack(std::string_view beside, PyObject* like, bool copy, const Limit& limit) override;
  PyObject* fill(std::string_view beside, PyObject* out, const Limit& limit) override;
  void refill(Refill& target, bool through, const Limit& limit) override;
  void copy_to(uintptr_t address, const Limit& limit) override;

 private:
  void allocate(const Limit& limit);
  void bring_meta(const Limit& limit);
  void bring(const std::vector<tl::Extent>& extents, const std::vector<Sink>& sinks, const Limit& limit, const Relay* relay = nullptr);
  void begin_relay();
  bool bring_into(const FillPlan& plan, const Limit& limit);
  std::vector<tl::Extent> payload_extents() const;

  std::shared_ptr<TcpConnection> tcp_;
  std::shared_ptr<void> keep_;
  std::shared_ptr<Block> block_;  // the same, where it is of the pool
  bool passes_on_ = false;
  Relay relay_;                   // its claim: 0: none
  std::vector<Extent> payload_;
  bool here_ = false;
  std::string meta_;
};

}  // namespace tl::python
