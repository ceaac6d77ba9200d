"""Small recorded machines, written for these tests in the forms that tools print."""

TABLE = """\
        GPU0    GPU1    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    PIX     SYS     0-7,16-23       0               N/A
GPU1    NV18     X      SYS     PXB     8-15,24-31      1               N/A
NIC0    PIX     SYS      X      SYS
NIC1    SYS     PXB     SYS      X

Legend:

  X    = Self
  NV#  = A number of NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_1
"""

PLAIN = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPIX\tSYS\t0-3\t0
GPU1\tPIX\t X \tSYS\t0-3\t0
GPU2\tSYS\tSYS\t X \t4-7\t1
"""

SHOWTOPO = """\
========================= ROCm System Management Interface =========================
=========================== Weight between two GPUs ============================
       GPU0         GPU1
GPU0   0            15
GPU1   15           0

============================ Hops between two GPUs =============================
       GPU0         GPU1
GPU0   0            1
GPU1   1            0

========================== Link Type between two GPUs ==========================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0

================================== Numa Nodes ==================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
GPU[1]\t\t: (Topology) Numa Node: 3
GPU[1]\t\t: (Topology) Numa Affinity: -1
============================= End of ROCm SMI Log ==============================
"""

_GPU = """
      <pci busid="0000:{bus}:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="{dev}" sm="90" rank="{dev}" gdr="1"><nvlink target="0000:a0:00.0" count="18" tclass="0x068000"/></gpu>
      </pci>"""

NCCL = f"""\
<system version="1">
  <cpu numaid="0" affinity="00000000,0000000f" arch="x86_64">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">{_GPU.format(bus="11", dev=0)}
      <pci busid="0000:12:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000" port="1"/></nic>
      </pci>
    </pci>
    <nic><net name="docker0" dev="1" speed="10000" port="0"/></nic>
  </cpu>
  <cpu numaid="1" affinity="0000000f,00000000" arch="x86_64">{_GPU.format(bus="81", dev=1)}
  </cpu>
</system>
"""
