// deepep._runtime: the Python face of the runtime. Pointers and streams are integers; no torch
// symbol crosses. Every call that may wait releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "kernels/device/internode/memory.h"
#include "kernels/device/lowlatency/workspace.h"
#include "kernels/runtime/bind_arguments.h"
#include "kernels/runtime/domain.h"
#include "kernels/runtime/library.h"
#include "kernels/runtime/network.h"

namespace deepep {
namespace {

// A piece of the pool as a Python object; a tensor made from it keeps it. On the host it has the
// buffer protocol, on a GPU the CUDA array interface.
class Block {
 public:
  Block(std::shared_ptr<Pool> pool, size_t bytes)
      : pool_(std::move(pool)), piece_(pool_->allocate(bytes)), bytes_(bytes) {}
  ~Block() { pool_->release(piece_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  uint64_t address() const { return reinterpret_cast<uint64_t>(piece_.data); }
  size_t bytes() const { return bytes_; }
  py::buffer_info view() const {
    return py::buffer_info(piece_.data, 1, py::format_descriptor<uint8_t>::format(),
                           static_cast<py::ssize_t>(bytes_));
  }

 private:
  std::shared_ptr<Pool> pool_;
  Pool::Piece piece_;
  size_t bytes_;
};

// Fills in where exported tensors lie, and waits until every peer can find them there: once for
// neighbours, which share a segment.
class Locator {
 public:
  Locator(Domain& domain, DeepEpOp op) : domain_(domain), op_(op) {}
  int32_t find(const void* data, uint64_t bytes, DeepEpLocator* at) {
    *at = DEEPEP_NO_LOCATOR;
    if (data == nullptr) return DEEPEP_OK;
    *at = domain_.locate(data, bytes);
    if (*at == DEEPEP_NO_LOCATOR) {
      throw std::invalid_argument("a tensor that peers must reach does not lie in exported memory");
    }
    if (*at >> 48 == segment_) return DEEPEP_OK;
    segment_ = *at >> 48;
    return domain_.await_opened(*at, op_);
  }

 private:
  Domain& domain_;
  const DeepEpOp op_;
  uint64_t segment_ = UINT64_MAX;  // of the last one
};

// What a wait asks: whether a signal has come whose handler raises, as that of Ctrl-C does.
// Handlers run in the main thread only; elsewhere this is never so.
int32_t signal_raises() {
  py::gil_scoped_acquire gil;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

// kFunction without the GIL; raises what a signal's handler raised meanwhile.
template <auto kFunction>
struct Waiting;
template <class Result, class... Args, Result (*kFunction)(Args...)>
struct Waiting<kFunction> {
  static Result call(Args... args) {
    Result result;
    {
      py::gil_scoped_release release;
      result = kFunction(args...);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return result;
  }
};

int32_t await_counts(Domain& domain, uint64_t ticket, double seconds) {
  return domain.await_counts(ticket, static_cast<uint64_t>(seconds * 1e9));
}

std::pair<int32_t, DeepEpLocator> await_exported(Domain& domain, uint64_t data, size_t bytes) {
  std::pair<int32_t, DeepEpLocator> found;
  found.first = Locator(domain, DEEPEP_OP_LOW_LATENCY_DISPATCH)
                    .find(reinterpret_cast<void*>(data), bytes, &found.second);
  return found;
}

int32_t notify(const Library& library, Domain& domain, DeepEpNotifyArgs args) {
  args.context = domain.context();
  args.counts = args.ticket != 0 ? domain.counts() : nullptr;
  return library.notify(args);
}

// Tells a dispatch where its receive tensors lie; of any topology, since their names are the same.
template <class Args>
int32_t find_receive(Domain& domain, Args* args) {
  const uint64_t rows = args->recv_capacity, topk = args->num_topk;
  const uint64_t row_bytes = static_cast<uint64_t>(args->hidden) * (args->num_scales > 0 ? 1 : 2);
  const struct {
    const void* data;
    uint64_t bytes;
    DeepEpLocator* at;
  } parts[] = {
      {args->recv_x, rows * row_bytes, &args->at_x},
      {args->recv_x_scales, rows * args->num_scales * 4, &args->at_x_scales},
      {args->recv_topk_idx, rows * topk * args->idx_bytes, &args->at_topk_idx},
      {args->recv_topk_weights, rows * topk * 4, &args->at_topk_weights},
      {args->recv_src_idx, rows * 4, &args->at_src_idx},
  };
  Locator locator(domain, DEEPEP_OP_DISPATCH);
  for (const auto& part : parts) {
    if (int32_t status = locator.find(part.data, part.bytes, part.at)) return status;
  }
  return DEEPEP_OK;
}

int32_t dispatch(const Library& library, Domain& domain, DeepEpDispatchArgs args) {
  args.context = domain.context();
  if (int32_t status = find_receive(domain, &args)) return status;
  return library.dispatch(args);
}

// The same for what a combine reads.
template <class Args>
int32_t find_sources(Domain& domain, Args* args) {
  const uint64_t rows = args->num_recv;
  Locator locator(domain, DEEPEP_OP_COMBINE);
  if (int32_t status = locator.find(args->x_exported, rows * args->hidden * 2, &args->at_x)) {
    return status;
  }
  return locator.find(args->topk_weights_exported, rows * args->num_topk * 4,
                      &args->at_topk_weights);
}

int32_t combine(const Library& library, Domain& domain, DeepEpCombineArgs args) {
  args.context = domain.context();
  if (int32_t status = find_sources(domain, &args)) return status;
  return library.combine(args);
}

// ---- Across nodes

int32_t internode_notify(const Library& library, Domain& domain, const Network& network,
                         DeepEpInternodeNotifyArgs args) {
  args.context = domain.context();
  args.network = network.facts();
  args.counts = args.ticket != 0 ? domain.counts() : nullptr;
  return library.internode_notify(args);
}

int32_t internode_dispatch(const Library& library, Domain& domain, const Network& network,
                           DeepEpInternodeDispatchArgs args) {
  args.context = domain.context();
  args.network = network.facts();
  if (int32_t status = find_receive(domain, &args)) return status;
  return library.internode_dispatch(args);
}

int32_t internode_combine(const Library& library, Domain& domain, const Network& network,
                          DeepEpInternodeCombineArgs args) {
  args.context = domain.context();
  args.network = network.facts();
  if (int32_t status = find_sources(domain, &args)) return status;
  return library.internode_combine(args);
}

// `recv_bytes`: of recv_x and what lies behind it, with a direct dispatch.
int32_t low_latency_dispatch(const Library& library, Domain& domain,
                             DeepEpLowLatencyDispatchArgs args, uint64_t recv_bytes) {
  args.context = domain.context();
  args.at = DEEPEP_NO_LOCATOR;
  if (args.direct) {
    const DeepEpOp op = DEEPEP_OP_LOW_LATENCY_DISPATCH;
    if (int32_t status = Locator(domain, op).find(args.recv_x, recv_bytes, &args.at)) return status;
  }
  return library.low_latency_dispatch(args);
}

// `x_bytes`: of x if peers are to read it where it lies, else 0.
int32_t low_latency_combine(const Library& library, Domain& domain,
                            DeepEpLowLatencyCombineArgs args, uint64_t x_bytes) {
  args.context = domain.context();
  args.at_x = DEEPEP_NO_LOCATOR;
  if (x_bytes != 0) {
    const DeepEpOp op = DEEPEP_OP_LOW_LATENCY_COMBINE;
    if (int32_t status = Locator(domain, op).find(args.x, x_bytes, &args.at_x)) return status;
  }
  return library.low_latency_combine(args);
}

void bind_library(py::module_& m) {
  py::class_<Library, std::shared_ptr<Library>>(m, "Library")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_property_readonly("facts",
                             [](const Library& self) {
                               const DeepEpVariantInfo& info = self.info();
                               py::dict facts;
                               facts["abi_version"] = info.abi_version;
                               facts["name"] = info.name;
                               facts["topology"] = info.topology;
                               facts["arch"] = info.arch;
                               facts["dtype"] = info.dtype;
                               facts["hidden"] = info.hidden;
                               facts["num_ranks"] = info.num_ranks;
                               facts["num_nodes"] = info.num_nodes;
                               return facts;
                             })
      .def("last_error", &Library::last_error)
      .def("layout", &Library::layout, py::call_guard<py::gil_scoped_release>())
      .def("notify", &Waiting<&notify>::call)
      .def("dispatch", &Waiting<&dispatch>::call)
      .def("combine", &Waiting<&combine>::call)
      .def("network_make_id", [](const Library& self) { return py::bytes(self.network_make_id()); })
      .def("network_join", &Library::network_join, py::call_guard<py::gil_scoped_release>())
      .def("network_allocate",
           [](const Library& self, uint64_t bytes) {
             py::gil_scoped_release release;  // all ranks meet in it
             return reinterpret_cast<uint64_t>(self.network_allocate(bytes));
           })
      .def("internode_layout", &Library::internode_layout, py::call_guard<py::gil_scoped_release>())
      .def("internode_notify", &Waiting<&internode_notify>::call)
      .def("internode_dispatch", &Waiting<&internode_dispatch>::call)
      .def("internode_combine", &Waiting<&internode_combine>::call)
      .def("low_latency_dispatch", &Waiting<&low_latency_dispatch>::call)
      .def("low_latency_combine", &Waiting<&low_latency_combine>::call);
}

void bind_domain(py::module_& m) {
  py::class_<Block>(m, "Block", py::buffer_protocol())
      .def_buffer(&Block::view)
      .def_property_readonly("__cuda_array_interface__",
                             [](const Block& self) {
                               py::dict interface;
                               interface["shape"] = py::make_tuple(self.bytes());
                               interface["typestr"] = "|u1";
                               interface["data"] = py::make_tuple(self.address(), false);
                               interface["version"] = 2;
                               return interface;
                             })
      .def_property_readonly("address", &Block::address)
      .def("__len__", &Block::bytes);

  py::class_<Domain>(m, "Domain")
      .def(py::init([](int rank, int num_ranks, int device, bool fabric) {
             auto made = std::make_unique<Domain>(rank, num_ranks, device, fabric);
             made->set_interrupt_check(&signal_raises);
             return made;
           }),
           py::arg("rank"), py::arg("num_ranks"), py::arg("device") = -1, py::arg("fabric") = false)
      .def("describe", [](const Domain& self) { return py::bytes(self.describe()); })
      .def("connect", &Domain::connect, py::call_guard<py::gil_scoped_release>())
      .def("set_timeout", [](Domain& self, double s) { self.set_timeout(uint64_t(s * 1e9)); })
      .def("allocate",
           [](Domain& self, size_t bytes) { return std::make_unique<Block>(self.pool(), bytes); })
      .def("exports",
           [](const Domain& self, uint64_t data, size_t bytes) {
             return self.locate(reinterpret_cast<void*>(data), bytes) != DEEPEP_NO_LOCATOR;
           })
      .def("export_allocation",
           [](Domain& self, uint64_t data) {
             self.export_allocation(reinterpret_cast<void*>(data));
           })
      .def("await_exported", &Waiting<&await_exported>::call,
           "Status and locator of exported memory, once every peer has opened it.")
      .def("set_workspaces", &Domain::set_workspaces)
      .def("await_counts", &Waiting<&await_counts>::call)
      .def_property_readonly("num_received",
                             [](Domain& self) { return self.counts()->num_recv_tokens; })
      .def_property_readonly("num_forwarded",
                             [](Domain& self) { return self.counts()->num_forward_tokens; })
      .def_property_readonly("received_per_expert",
                             [](Domain& self) {
                               const DeepEpCounts& counts = *self.counts();
                               const int32_t* experts = counts.per_expert;
                               return std::vector<int32_t>(experts,
                                                           experts + counts.num_local_experts);
                             })
      .def_property_readonly("fault_code", [](const Domain& self) { return self.fault().code; })
      .def_property_readonly("fault",
                             [](const Domain& self) {
                               const DeepEpFault& fault = self.fault();
                               py::dict fields;
                               fields["code"] = fault.code;
                               fields["op"] = fault.op;
                               fields["phase"] = fault.phase;
                               fields["rank"] = fault.rank;
                               fields["epoch"] = fault.epoch;
                               fields["peers"] = fault.peers;
                               fields["nodes"] = fault.nodes;
                               fields["expected"] = fault.expected;
                               fields["seen"] = fault.seen;
                               return fields;
                             })
      .def_property_readonly("directory_error", &Domain::directory_error)
      .def_property_readonly("reserved_bytes",
                             [](const Domain& self) { return self.pool()->reserved_bytes(); })
      .def_property_readonly("used_bytes",
                             [](const Domain& self) { return self.pool()->used_bytes(); })
      .def_property_readonly("epochs", &Domain::epochs)
      .def("reset", &Domain::reset)
      .def("close", &Domain::close, py::call_guard<py::gil_scoped_release>());
}

void bind_network(py::module_& m) {
  py::class_<Network>(m, "Network")
      .def(py::init<int, int, int, int, int, size_t, uint64_t>(), py::arg("node"),
           py::arg("num_nodes"), py::arg("local_rank"), py::arg("ranks_per_node"),
           py::arg("num_channels"), py::arg("num_bytes"), py::arg("seed") = 0)
      .def(py::init([](int node, int num_nodes, int local_rank, int ranks_per_node,
                       int num_channels, size_t bytes, uint64_t memory) {
             return std::make_unique<Network>(node, num_nodes, local_rank, ranks_per_node,
                                              num_channels, bytes, reinterpret_cast<void*>(memory));
           }),
           py::arg("node"), py::arg("num_nodes"), py::arg("local_rank"), py::arg("ranks_per_node"),
           py::arg("num_channels"), py::arg("num_bytes"), py::kw_only(), py::arg("memory"))
      .def("describe", [](const Network& self) { return py::bytes(self.describe()); })
      .def("connect", &Network::connect)
      .def("drop", &Network::drop)
      .def("clear", &Network::clear)
      .def("close", &Network::close)
      .def_property_readonly("num_bytes", [](const Network& self) { return self.facts()->bytes; })
      .def_property_readonly("messages_sent",
                             [](const Network& self) { return self.transport().messages; })
      .def_property_readonly("bytes_sent",
                             [](const Network& self) { return self.transport().bytes; });
  m.def("network_memory_hint", &network_bytes, py::arg("num_nodes"), py::arg("ranks_per_node"),
        py::arg("num_channels"), py::arg("message_bytes"), py::arg("slots"));
  m.def(
      "internode_message_bytes",
      [](int64_t ranks_per_node, int64_t row_bytes, int64_t num_scales, int64_t num_topk,
         int64_t idx_bytes) {
        return py::make_tuple(
            DispatchMessage(ranks_per_node, row_bytes, num_scales, num_topk, idx_bytes).total,
            CombineMessage(row_bytes, num_topk).total);
      },
      py::arg("ranks_per_node"), py::arg("row_bytes"), py::arg("num_scales"), py::arg("num_topk"),
      py::arg("idx_bytes"), "Bytes of a message of dispatch, and of one of combine.");
}

}  // namespace

PYBIND11_MODULE(_runtime, m) {
  m.doc() = "Shared memory, library loading and launches of deepep; see kernels/runtime.";
  m.attr("ABI_VERSION") = DEEPEP_ABI_VERSION;
  m.attr("MAX_RANKS") = DEEPEP_MAX_RANKS;
  m.attr("MAX_TOPK") = DEEPEP_MAX_TOPK;
  m.attr("MAX_NODES") = DEEPEP_MAX_NODES;
  m.attr("MAX_CHANNELS") = DEEPEP_MAX_CHANNELS;
  m.attr("MAX_LOCAL_EXPERTS") = DEEPEP_MAX_LOCAL_EXPERTS;
  m.attr("MAX_SEGMENTS") = DEEPEP_MAX_SEGMENTS;
  m.attr("MAX_LOW_LATENCY_EXPERTS") = DEEPEP_MAX_LOW_LATENCY_EXPERTS;
  m.attr("MAX_LOW_LATENCY_ROWS") = DEEPEP_MAX_LOW_LATENCY_ROWS;
  m.attr("CONTROL_BYTES") = sizeof(Control);
  m.def("cuda_available", &cuda::available, "Whether a CUDA driver is installed.");
  m.def("preload", &preload, py::arg("path"));
  m.def("device_uuid", [](int device) { return py::bytes(cuda::device_uuid(device)); });
  m.def("num_multiprocessors", &cuda::num_multiprocessors);
  m.def(
      "allocation_of",
      [](uint64_t data) {
        const cuda::Range range = cuda::range_of(data);
        return py::make_tuple(range.base, range.bytes, range.id);
      },
      "Base address, bytes and identity of the device allocation that an address lies in.");
  m.def("low_latency_workspace_hint", &workspace_hint, py::arg("max_tokens"), py::arg("hidden"),
        py::arg("num_ranks"), py::arg("num_experts"));
  bind_arguments(m);
  bind_library(m);
  bind_domain(m);
  bind_network(m);
}

}  // namespace deepep
