// Printed by stock_metadata.py from torch 2.15.0+cu132; do not edit.

#include "stock_metadata.h"

namespace torch_ckpt::test {

using namespace std::string_view_literals;

const std::vector<StockMetadata>& stock_metadata() {
  static const std::vector<StockMetadata> kMetadata = {
      {"ours",
       "\200\004\225S\004\000\000\000\000\000\000\214%torch.distributed.checkpoint.metadata\224"
       "\214\010Metadata\224\223\224)\201\224}\224(\214\023state_dict_metadata\224}\224(\214\006"
       "weight\224h\000\214\025TensorStorageMetadata\224\223\224)\201\224}\224(\214\nproperties"
       "\224h\000\214\020TensorProperties\224\223\224)\201\224(\214\005torch\224\214\007float32"
       "\224\223\224\214\023torch.serialization\224\214\013_get_layout\224\223\224\214\015torch."
       "strided\224\205\224R\224\211h\000\214\024_MEM_FORMAT_ENCODING\224\223\224K\000\205\224R"
       "\224\211t\224b\214\004size\224\214\005torch\224\214\004Size\224\223\224K\002M,\001\206"
       "\224\205\224R\224\214\006chunks\224]\224h\000\214\024ChunkStorageMetadata\224\223\224)"
       "\201\224}\224(\214\007offsets\224h!K\000K\000\206\224\205\224R\224\214\005sizes\224h!K"
       "\002M,\001\206\224\205\224R\224ubaub\214\004bias\224h\011)\201\224}\224(h\014h\016)\201"
       "\224(h\022h\030\211h\034\211t\224bh\036h!K\002\205\224\205\224R\224h%]\224h()\201\224}"
       "\224(h+h!K\000\205\224\205\224R\224h/h!K\002\205\224\205\224R\224ubaub\214\004step\224h"
       "\000\214\024BytesStorageMetadata\224\223\224)\201\224u\214\014planner_data\224}\224(h"
       "\007h\007\205\224h3h3\205\224hDhD\205\224u\214\014storage_data\224}\224(h\000\214\015Met"
       "adataIndex\224\223\224)\201\224}\224(\214\003fqn\224h\007\214\005index\224K\000\214\006o"
       "ffset\224h!K\000K\000\206\224\205\224R\224ub\214'torch.distributed.checkpoint.filesystem"
       "\224\214\014_StorageInfo\224\223\224)\201\224}\224(\214\015relative_path\224\214\014__0_"
       "0.distcp\224hUJp\021\001\000\214\006length\224KZubhP)\201\224}\224(hSh3hTK\000hUh!K\000"
       "\205\224\205\224R\224ubh[)\201\224}\224(h^h_hUJp\021\001\000h`KZubhP)\201\224}\224(hShDh"
       "TNubh[)\201\224}\224(h^h_hUJp\021\001\000h`KZubu\214\014storage_meta\224h\000\214\013Sto"
       "rageMeta\224\223\224)\201\224}\224(\214\015checkpoint_id\224\214\007pathlib\224\214\011P"
       "osixPath\224\223\224\214\001/\224\214\013checkpoints\224\214\0011\224\207\224R\224\214"
       "\007save_id\224N\214\007load_id\224N\214\007modules\224]\224ub\214\007version\224N\214\n"
       "torch_ckpt\224}\224(h~K\001\214\011checksums\224}\224h_C(\000\001\002\003\004\005\006"
       "\007\010\011\n\013\014\015\016\017\020\021\022\023\024\025\026\027\030\031\032\033\034"
       "\035\036\037 !\"#$%&'\224suub."sv},
      {"small_2",
       "\200\002ctorch.distributed.checkpoint.metadata\nMetadata\nq\000)\201q\001}q\002(X\023"
       "\000\000\000state_dict_metadataq\003}q\004(X\006\000\000\000weightq\005ctorch.distribute"
       "d.checkpoint.metadata\nTensorStorageMetadata\nq\006)\201q\007}q\010(X\n\000\000\000prope"
       "rtiesq\011ctorch.distributed.checkpoint.metadata\nTensorProperties\nq\n)\201q\013(ctorch"
       "\nfloat32\nq\014ctorch.serialization\n_get_layout\nq\015X\015\000\000\000torch.stridedq"
       "\016\205q\017Rq\020\211ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nq"
       "\021K\000\205q\022Rq\023\211M,\001K\001\206q\024tq\025bX\004\000\000\000sizeq\026ctorch"
       "\nSize\nq\027K\002M,\001\206q\030\205q\031Rq\032X\006\000\000\000chunksq\033]q\034ctorch"
       ".distributed.checkpoint.metadata\nChunkStorageMetadata\nq\035)\201q\036}q\037(X\007\000"
       "\000\000offsetsq h\027K\000K\000\206q!\205q\"Rq#X\005\000\000\000sizesq$h\027K\002M,\001"
       "\206q%\205q&Rq'ubaubX\004\000\000\000biasq(h\006)\201q)}q*(h\011h\n)\201q+(h\014h\020"
       "\211h\023\211K\001\205q,tq-bh\026h\027K\002\205q.\205q/Rq0h\033]q1h\035)\201q2}q3(h h"
       "\027K\000\205q4\205q5Rq6h$h\027K\002\205q7\205q8Rq9ubaubX\004\000\000\000stepq:ctorch.di"
       "stributed.checkpoint.metadata\nBytesStorageMetadata\nq;)\201q<uX\014\000\000\000planner_"
       "dataq=}q>(h\005h\005\205q?h(h(\205q@h:h:\205qAuX\014\000\000\000storage_dataqB}qC(ctorch"
       ".distributed.checkpoint.metadata\nMetadataIndex\nqD)\201qE}qF(X\003\000\000\000fqnqGh"
       "\005X\005\000\000\000indexqHK\000X\006\000\000\000offsetqIh\027K\000K\000\206qJ\205qKRqL"
       "ubctorch.distributed.checkpoint.filesystem\n_StorageInfo\nqM)\201qN}qO(X\015\000\000\000"
       "relative_pathqPX\014\000\000\000__0_0.distcpqQhIJp\021\001\000X\006\000\000\000lengthqRK"
       "ZubhD)\201qS}qT(hGh(hHK\000hIh\027K\000\205qU\205qVRqWubhM)\201qX}qY(hPhQhIJp\021\001"
       "\000hRKZubhD)\201qZ}q[(hGh:hHNubhM)\201q\\}q](hPhQhIJp\021\001\000hRKZubuX\014\000\000"
       "\000storage_metaq^ctorch.distributed.checkpoint.metadata\nStorageMeta\nq_)\201q`}qa(X"
       "\015\000\000\000checkpoint_idqbcpathlib\nPosixPath\nqcX\001\000\000\000/qdX\013\000\000"
       "\000checkpointsqeX\001\000\000\0001qf\207qgRqhX\007\000\000\000save_idqiNX\007\000\000"
       "\000load_idqjNX\007\000\000\000modulesqk]qlubX\007\000\000\000versionqmNub."sv},
      {"small_5",
       "\200\005\225\015\004\000\000\000\000\000\000\214%torch.distributed.checkpoint.metadata"
       "\224\214\010Metadata\224\223\224)\201\224}\224(\214\023state_dict_metadata\224}\224(\214"
       "\006weight\224h\000\214\025TensorStorageMetadata\224\223\224)\201\224}\224(\214\npropert"
       "ies\224h\000\214\020TensorProperties\224\223\224)\201\224(\214\005torch\224\214\007float"
       "32\224\223\224\214\023torch.serialization\224\214\013_get_layout\224\223\224\214\015torc"
       "h.strided\224\205\224R\224\211h\000\214\024_MEM_FORMAT_ENCODING\224\223\224K\000\205\224"
       "R\224\211M,\001K\001\206\224t\224b\214\004size\224\214\005torch\224\214\004Size\224\223"
       "\224K\002M,\001\206\224\205\224R\224\214\006chunks\224]\224h\000\214\024ChunkStorageMeta"
       "data\224\223\224)\201\224}\224(\214\007offsets\224h\"K\000K\000\206\224\205\224R\224\214"
       "\005sizes\224h\"K\002M,\001\206\224\205\224R\224ubaub\214\004bias\224h\011)\201\224}\224"
       "(h\014h\016)\201\224(h\022h\030\211h\034\211K\001\205\224t\224bh\037h\"K\002\205\224\205"
       "\224R\224h&]\224h))\201\224}\224(h,h\"K\000\205\224\205\224R\224h0h\"K\002\205\224\205"
       "\224R\224ubaub\214\004step\224h\000\214\024BytesStorageMetadata\224\223\224)\201\224u"
       "\214\014planner_data\224}\224(h\007h\007\205\224h4h4\205\224hFhF\205\224u\214\014storage"
       "_data\224}\224(h\000\214\015MetadataIndex\224\223\224)\201\224}\224(\214\003fqn\224h\007"
       "\214\005index\224K\000\214\006offset\224h\"K\000K\000\206\224\205\224R\224ub\214'torch.d"
       "istributed.checkpoint.filesystem\224\214\014_StorageInfo\224\223\224)\201\224}\224(\214"
       "\015relative_path\224\214\014__0_0.distcp\224hWJp\021\001\000\214\006length\224KZubhR)"
       "\201\224}\224(hUh4hVK\000hWh\"K\000\205\224\205\224R\224ubh])\201\224}\224(h`hahWJp\021"
       "\001\000hbKZubhR)\201\224}\224(hUhFhVNubh])\201\224}\224(h`hahWJp\021\001\000hbKZubu\214"
       "\014storage_meta\224h\000\214\013StorageMeta\224\223\224)\201\224}\224(\214\015checkpoin"
       "t_id\224\214\007pathlib\224\214\011PosixPath\224\223\224\214\001/\224\214\013checkpoints"
       "\224\214\0011\224\207\224R\224\214\007save_id\224N\214\007load_id\224N\214\007modules"
       "\224]\224ub\214\007version\224Nub."sv},
      {"rich_2",
       "\200\002ctorch.distributed.checkpoint.metadata\nMetadata\nq\000)\201q\001}q\002(X\023"
       "\000\000\000state_dict_metadataq\003}q\004(X\006\000\000\000weightq\005ctorch.distribute"
       "d.checkpoint.metadata\nTensorStorageMetadata\nq\006)\201q\007}q\010(X\n\000\000\000prope"
       "rtiesq\011ctorch.distributed.checkpoint.metadata\nTensorProperties\nq\n)\201q\013(ctorch"
       "\nfloat32\nq\014ctorch.serialization\n_get_layout\nq\015X\015\000\000\000torch.stridedq"
       "\016\205q\017Rq\020\211ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nq"
       "\021K\000\205q\022Rq\023\211M,\001K\001\206q\024tq\025bX\004\000\000\000sizeq\026ctorch"
       "\nSize\nq\027K\002M,\001\206q\030\205q\031Rq\032X\006\000\000\000chunksq\033]q\034ctorch"
       ".distributed.checkpoint.metadata\nChunkStorageMetadata\nq\035)\201q\036}q\037(X\007\000"
       "\000\000offsetsq h\027K\000K\000\206q!\205q\"Rq#X\005\000\000\000sizesq$h\027K\002M,\001"
       "\206q%\205q&Rq'ubaubX\004\000\000\000biasq(h\006)\201q)}q*(h\011h\n)\201q+(h\014h\020"
       "\211h\023\211K\001\205q,tq-bh\026h\027K\002\205q.\205q/Rq0h\033]q1h\035)\201q2}q3(h h"
       "\027K\000\205q4\205q5Rq6h$h\027K\002\205q7\205q8Rq9ubaubX\004\000\000\000stepq:ctorch.di"
       "stributed.checkpoint.metadata\nBytesStorageMetadata\nq;)\201q<uX\014\000\000\000planner_"
       "dataq=}q>(X\006\000\000\000shardsq?ctorch.distributed._shard.sharded_tensor.metadata\nSh"
       "ardedTensorMetadata\nq@)\201qA}qB(X\017\000\000\000shards_metadataqC]qDctorch.distribute"
       "d._shard.metadata\nShardMetadata\nqE)\201qFN}qG(X\015\000\000\000shard_offsetsqH]qI(K"
       "\000K\000eX\013\000\000\000shard_sizesqJ]qK(K\002K\003eX\011\000\000\000placementqLNu"
       "\206qMbah\026h\027K\002K\003\206qN\205qORqPX\021\000\000\000tensor_propertiesqQctorch.di"
       "stributed._shard.sharded_tensor.metadata\nTensorProperties\nqR)\201qS(h\014h\020\211ctor"
       "ch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\nqTK\000\205qURqV\211"
       "NtqWbubX\005\000\000\000otherqX]qY(N\210\212\006\000\000\000\000\000\001G?\340\000\000"
       "\000\000\000\000K\001X\003\000\000\000twoqZ\205q[\206q\\}q]K\003}q^sccollections\nOrdere"
       "dDict\nq_)Rq`X\001\000\000\000aqaK\001sX,\001\000\000xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xqbeuX\014\000\000\000storage_dataqc]qdctorch.distributed.checkpoint.filesystem\n_Storag"
       "ePrefix\nqe)\201qf}qgX\006\000\000\000prefixqhX\004\000\000\000__0_qisbaX\014\000\000"
       "\000storage_metaqjctorch.distributed.checkpoint.metadata\nStorageMeta\nqk)\201ql}qm(X"
       "\015\000\000\000checkpoint_idqncpathlib\nPosixPath\nqoX\001\000\000\000/qpX\013\000\000"
       "\000checkpointsqqX\001\000\000\0001qr\207qsRqtX\007\000\000\000save_idquNX\007\000\000"
       "\000load_idqvNX\007\000\000\000modulesqw]qxubX\007\000\000\000versionqyNX\017\000\000"
       "\000all_local_plansqz]q{ctorch.distributed.checkpoint.planner\nSavePlan\nq|)\201q}}q~(X"
       "\005\000\000\000itemsq\177]q\200(ctorch.distributed.checkpoint.planner\nWriteItem\nq\201"
       ")\201q\202}q\203(X\005\000\000\000indexq\204ctorch.distributed.checkpoint.metadata\nMeta"
       "dataIndex\nq\205)\201q\206}q\207(X\003\000\000\000fqnq\210h\005h\204NX\006\000\000\000of"
       "fsetq\211h\027K\000\205q\212\205q\213Rq\214ubX\004\000\000\000typeq\215ctorch.distribute"
       "d.checkpoint.planner\nWriteItemType\nq\216K\001\205q\217Rq\220X\015\000\000\000bytes_io_"
       "dataq\221NX\013\000\000\000tensor_dataq\222ctorch.distributed.checkpoint.planner\nTensor"
       "WriteData\nq\223)\201q\224}q\225(X\005\000\000\000chunkq\226h\035)\201q\227}q\230(h h"
       "\027K\000\205q\231\205q\232Rq\233h$h\027K\002\205q\234\205q\235Rq\236ubh\011h\n)\201q"
       "\237(h\014h\020\211h\023\211K\001\205q\240tq\241bh\026h\027K\002\205q\242\205q\243Rq\244"
       "ububh\201)\201q\245}q\246(h\204h\205)\201q\247}q\250(h\210h:h\204Nubh\215h\216K\003\205q"
       "\251Rq\252h\221Nh\222NubehcNh=}q\253(h\005h\005\205q\254h:h:\205q\255uX\006\000\000\000u"
       "sableq\256\210ubaub."sv},
      {"rich_3",
       "\200\003ctorch.distributed.checkpoint.metadata\nMetadata\nq\000)\201q\001}q\002(X\023"
       "\000\000\000state_dict_metadataq\003}q\004(X\006\000\000\000weightq\005ctorch.distribute"
       "d.checkpoint.metadata\nTensorStorageMetadata\nq\006)\201q\007}q\010(X\n\000\000\000prope"
       "rtiesq\011ctorch.distributed.checkpoint.metadata\nTensorProperties\nq\n)\201q\013(ctorch"
       "\nfloat32\nq\014ctorch.serialization\n_get_layout\nq\015X\015\000\000\000torch.stridedq"
       "\016\205q\017Rq\020\211ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nq"
       "\021K\000\205q\022Rq\023\211M,\001K\001\206q\024tq\025bX\004\000\000\000sizeq\026ctorch"
       "\nSize\nq\027K\002M,\001\206q\030\205q\031Rq\032X\006\000\000\000chunksq\033]q\034ctorch"
       ".distributed.checkpoint.metadata\nChunkStorageMetadata\nq\035)\201q\036}q\037(X\007\000"
       "\000\000offsetsq h\027K\000K\000\206q!\205q\"Rq#X\005\000\000\000sizesq$h\027K\002M,\001"
       "\206q%\205q&Rq'ubaubX\004\000\000\000biasq(h\006)\201q)}q*(h\011h\n)\201q+(h\014h\020"
       "\211h\023\211K\001\205q,tq-bh\026h\027K\002\205q.\205q/Rq0h\033]q1h\035)\201q2}q3(h h"
       "\027K\000\205q4\205q5Rq6h$h\027K\002\205q7\205q8Rq9ubaubX\004\000\000\000stepq:ctorch.di"
       "stributed.checkpoint.metadata\nBytesStorageMetadata\nq;)\201q<uX\014\000\000\000planner_"
       "dataq=}q>(X\006\000\000\000shardsq?ctorch.distributed._shard.sharded_tensor.metadata\nSh"
       "ardedTensorMetadata\nq@)\201qA}qB(X\017\000\000\000shards_metadataqC]qDctorch.distribute"
       "d._shard.metadata\nShardMetadata\nqE)\201qFN}qG(X\015\000\000\000shard_offsetsqH]qI(K"
       "\000K\000eX\013\000\000\000shard_sizesqJ]qK(K\002K\003eX\011\000\000\000placementqLNu"
       "\206qMbah\026h\027K\002K\003\206qN\205qORqPX\021\000\000\000tensor_propertiesqQctorch.di"
       "stributed._shard.sharded_tensor.metadata\nTensorProperties\nqR)\201qS(h\014h\020\211ctor"
       "ch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\nqTK\000\205qURqV\211"
       "NtqWbubX\005\000\000\000otherqX]qY(N\210\212\006\000\000\000\000\000\001G?\340\000\000"
       "\000\000\000\000K\001X\003\000\000\000twoqZ\205q[\206q\\}q]K\003}q^sccollections\nOrdere"
       "dDict\nq_)Rq`X\001\000\000\000aqaK\001sX,\001\000\000xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xqbeuX\014\000\000\000storage_dataqc]qdctorch.distributed.checkpoint.filesystem\n_Storag"
       "ePrefix\nqe)\201qf}qgX\006\000\000\000prefixqhX\004\000\000\000__0_qisbaX\014\000\000"
       "\000storage_metaqjctorch.distributed.checkpoint.metadata\nStorageMeta\nqk)\201ql}qm(X"
       "\015\000\000\000checkpoint_idqncpathlib\nPosixPath\nqoX\001\000\000\000/qpX\013\000\000"
       "\000checkpointsqqX\001\000\000\0001qr\207qsRqtX\007\000\000\000save_idquNX\007\000\000"
       "\000load_idqvNX\007\000\000\000modulesqw]qxubX\007\000\000\000versionqyNX\017\000\000"
       "\000all_local_plansqz]q{ctorch.distributed.checkpoint.planner\nSavePlan\nq|)\201q}}q~(X"
       "\005\000\000\000itemsq\177]q\200(ctorch.distributed.checkpoint.planner\nWriteItem\nq\201"
       ")\201q\202}q\203(X\005\000\000\000indexq\204ctorch.distributed.checkpoint.metadata\nMeta"
       "dataIndex\nq\205)\201q\206}q\207(X\003\000\000\000fqnq\210h\005h\204NX\006\000\000\000of"
       "fsetq\211h\027K\000\205q\212\205q\213Rq\214ubX\004\000\000\000typeq\215ctorch.distribute"
       "d.checkpoint.planner\nWriteItemType\nq\216K\001\205q\217Rq\220X\015\000\000\000bytes_io_"
       "dataq\221NX\013\000\000\000tensor_dataq\222ctorch.distributed.checkpoint.planner\nTensor"
       "WriteData\nq\223)\201q\224}q\225(X\005\000\000\000chunkq\226h\035)\201q\227}q\230(h h"
       "\027K\000\205q\231\205q\232Rq\233h$h\027K\002\205q\234\205q\235Rq\236ubh\011h\n)\201q"
       "\237(h\014h\020\211h\023\211K\001\205q\240tq\241bh\026h\027K\002\205q\242\205q\243Rq\244"
       "ububh\201)\201q\245}q\246(h\204h\205)\201q\247}q\250(h\210h:h\204Nubh\215h\216K\003\205q"
       "\251Rq\252h\221Nh\222NubehcNh=}q\253(h\005h\005\205q\254h:h:\205q\255uX\006\000\000\000u"
       "sableq\256\210ubaub."sv},
      {"rich_4",
       "\200\004\225\265\007\000\000\000\000\000\000\214%torch.distributed.checkpoint.metadata"
       "\224\214\010Metadata\224\223\224)\201\224}\224(\214\023state_dict_metadata\224}\224(\214"
       "\006weight\224h\000\214\025TensorStorageMetadata\224\223\224)\201\224}\224(\214\npropert"
       "ies\224h\000\214\020TensorProperties\224\223\224)\201\224(\214\005torch\224\214\007float"
       "32\224\223\224\214\023torch.serialization\224\214\013_get_layout\224\223\224\214\015torc"
       "h.strided\224\205\224R\224\211h\000\214\024_MEM_FORMAT_ENCODING\224\223\224K\000\205\224"
       "R\224\211M,\001K\001\206\224t\224b\214\004size\224\214\005torch\224\214\004Size\224\223"
       "\224K\002M,\001\206\224\205\224R\224\214\006chunks\224]\224h\000\214\024ChunkStorageMeta"
       "data\224\223\224)\201\224}\224(\214\007offsets\224h\"K\000K\000\206\224\205\224R\224\214"
       "\005sizes\224h\"K\002M,\001\206\224\205\224R\224ubaub\214\004bias\224h\011)\201\224}\224"
       "(h\014h\016)\201\224(h\022h\030\211h\034\211K\001\205\224t\224bh\037h\"K\002\205\224\205"
       "\224R\224h&]\224h))\201\224}\224(h,h\"K\000\205\224\205\224R\224h0h\"K\002\205\224\205"
       "\224R\224ubaub\214\004step\224h\000\214\024BytesStorageMetadata\224\223\224)\201\224u"
       "\214\014planner_data\224}\224(\214\006shards\224\2140torch.distributed._shard.sharded_te"
       "nsor.metadata\224\214\025ShardedTensorMetadata\224\223\224)\201\224}\224(\214\017shards_"
       "metadata\224]\224\214!torch.distributed._shard.metadata\224\214\015ShardMetadata\224\223"
       "\224)\201\224N}\224(\214\015shard_offsets\224]\224(K\000K\000e\214\013shard_sizes\224]"
       "\224(K\002K\003e\214\011placement\224Nu\206\224bah\037h\"K\002K\003\206\224\205\224R\224"
       "\214\021tensor_properties\224hMh\015\223\224)\201\224(h\022h\030\211hM\214\023MEM_FORMAT"
       "_ENCODING\224\223\224K\000\205\224R\224\211Nt\224bub\214\005other\224]\224(N\210\212\006"
       "\000\000\000\000\000\001G?\340\000\000\000\000\000\000K\001\214\003two\224\205\224\206"
       "\224}\224K\003}\224s\214\013collections\224\214\013OrderedDict\224\223\224)R\224\214\001"
       "a\224K\001sX,\001\000\000xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\224eu\214\014storage_data"
       "\224]\224\214'torch.distributed.checkpoint.filesystem\224\214\016_StoragePrefix\224\223"
       "\224)\201\224}\224\214\006prefix\224\214\004__0_\224sba\214\014storage_meta\224h\000\214"
       "\013StorageMeta\224\223\224)\201\224}\224(\214\015checkpoint_id\224\214\007pathlib\224"
       "\214\011PosixPath\224\223\224\214\001/\224\214\013checkpoints\224\214\0011\224\207\224R"
       "\224\214\007save_id\224N\214\007load_id\224N\214\007modules\224]\224ub\214\007version"
       "\224N\214\017all_local_plans\224]\224\214$torch.distributed.checkpoint.planner\224\214"
       "\010SavePlan\224\223\224)\201\224}\224(\214\005items\224]\224(h\225\214\011WriteItem\224"
       "\223\224)\201\224}\224(\214\005index\224h\000\214\015MetadataIndex\224\223\224)\201\224}"
       "\224(\214\003fqn\224h\007h\240N\214\006offset\224h\"K\000\205\224\205\224R\224ub\214\004"
       "type\224h\225\214\015WriteItemType\224\223\224K\001\205\224R\224\214\015bytes_io_data"
       "\224N\214\013tensor_data\224h\225\214\017TensorWriteData\224\223\224)\201\224}\224(\214"
       "\005chunk\224h))\201\224}\224(h,h\"K\000\205\224\205\224R\224h0h\"K\002\205\224\205\224R"
       "\224ubh\014h\016)\201\224(h\022h\030\211h\034\211K\001\205\224t\224bh\037h\"K\002\205"
       "\224\205\224R\224ububh\235)\201\224}\224(h\240h\242)\201\224}\224(h\245hFh\240Nubh\252h"
       "\254K\003\205\224R\224h\257Nh\260NubehwNhJ}\224(h\007h\007\205\224hFhF\205\224u\214\006u"
       "sable\224\210ubaub."sv},
      {"rich_looked_up",
       "\200\004\225\367\007\000\000\000\000\000\000\214%torch.distributed.checkpoint.metadata"
       "\224\214\010Metadata\224\223\224)\201\224}\224(\214\023state_dict_metadata\224}\224(\214"
       "\006weight\224h\000\214\025TensorStorageMetadata\224\223\224)\201\224}\224(\214\npropert"
       "ies\224h\000\214\020TensorProperties\224\223\224)\201\224(\214\005torch\224\214\007float"
       "32\224\223\224\214\023torch.serialization\224\214\013_get_layout\224\223\224\214\015torc"
       "h.strided\224\205\224R\224\211\214\010builtins\224\214\007getattr\224\223\224h\000\214"
       "\024_MEM_FORMAT_ENCODING\224\223\224\214\027TORCH_CONTIGUOUS_FORMAT\224\206\224R\224\211"
       "M,\001K\001\206\224t\224b\214\004size\224\214\005torch\224\214\004Size\224\223\224K\002M"
       ",\001\206\224\205\224R\224\214\006chunks\224]\224h\000\214\024ChunkStorageMetadata\224"
       "\223\224)\201\224}\224(\214\007offsets\224h&K\000K\000\206\224\205\224R\224\214\005sizes"
       "\224h&K\002M,\001\206\224\205\224R\224ubaub\214\004bias\224h\011)\201\224}\224(h\014h"
       "\016)\201\224(h\022h\030\211h \211K\001\205\224t\224bh#h&K\002\205\224\205\224R\224h*]"
       "\224h-)\201\224}\224(h0h&K\000\205\224\205\224R\224h4h&K\002\205\224\205\224R\224ubaub"
       "\214\004step\224h\000\214\024BytesStorageMetadata\224\223\224)\201\224u\214\014planner_d"
       "ata\224}\224(\214\006shards\224\2140torch.distributed._shard.sharded_tensor.metadata\224"
       "\214\025ShardedTensorMetadata\224\223\224)\201\224}\224(\214\017shards_metadata\224]\224"
       "\214!torch.distributed._shard.metadata\224\214\015ShardMetadata\224\223\224)\201\224N}"
       "\224(\214\015shard_offsets\224]\224(K\000K\000e\214\013shard_sizes\224]\224(K\002K\003e"
       "\214\011placement\224Nu\206\224bah#h&K\002K\003\206\224\205\224R\224\214\021tensor_prope"
       "rties\224hQh\015\223\224)\201\224(h\022h\030\211hQ\214\023MEM_FORMAT_ENCODING\224\223"
       "\224K\000\205\224R\224\211Nt\224bub\214\005other\224]\224(N\210\212\006\000\000\000\000"
       "\000\001G?\340\000\000\000\000\000\000K\001\214\003two\224\205\224\206\224}\224K\003}"
       "\224s\214\013collections\224\214\013OrderedDict\224\223\224)R\224\214\001a\224K\001sX,"
       "\001\000\000xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\224eu\214\014storage_data\224]\224\214'"
       "torch.distributed.checkpoint.filesystem\224\214\016_StoragePrefix\224\223\224)\201\224}"
       "\224\214\006prefix\224\214\004__0_\224sba\214\014storage_meta\224h\000\214\013StorageMet"
       "a\224\223\224)\201\224}\224(\214\015checkpoint_id\224\214\007pathlib\224\214\011PosixPat"
       "h\224\223\224\214\001/\224\214\013checkpoints\224\214\0011\224\207\224R\224\214\007save_"
       "id\224N\214\007load_id\224N\214\007modules\224]\224ub\214\007version\224N\214\017all_loc"
       "al_plans\224]\224\214$torch.distributed.checkpoint.planner\224\214\010SavePlan\224\223"
       "\224)\201\224}\224(\214\005items\224]\224(h\231\214\011WriteItem\224\223\224)\201\224}"
       "\224(\214\005index\224h\000\214\015MetadataIndex\224\223\224)\201\224}\224(\214\003fqn"
       "\224h\007h\244N\214\006offset\224h&K\000\205\224\205\224R\224ub\214\004type\224h\033h"
       "\231\214\015WriteItemType\224\223\224\214\006TENSOR\224\206\224R\224\214\015bytes_io_dat"
       "a\224N\214\013tensor_data\224h\231\214\017TensorWriteData\224\223\224)\201\224}\224(\214"
       "\005chunk\224h-)\201\224}\224(h0h&K\000\205\224\205\224R\224h4h&K\002\205\224\205\224R"
       "\224ubh\014h\016)\201\224(h\022h\030\211h \211K\001\205\224t\224bh#h&K\002\205\224\205"
       "\224R\224ububh\241)\201\224}\224(h\244h\246)\201\224}\224(h\251hJh\244Nubh\256h\033h\260"
       "\214\007BYTE_IO\224\206\224R\224h\264Nh\265Nubeh{NhN}\224(h\007h\007\205\224hJhJ\205\224"
       "u\214\006usable\224\210ubaub."sv},
  };
  return kMetadata;
}

const index::Globals& stock_globals() {
  static const index::Globals kGlobals = {
      {"builtins getattr", index::GlobalRole::member},
      {"pathlib Path", index::GlobalRole::function},
      {"pathlib PosixPath", index::GlobalRole::function},
      {"pathlib PurePosixPath", index::GlobalRole::function},
      {"pathlib._local Path", index::GlobalRole::function},
      {"pathlib._local PosixPath", index::GlobalRole::function},
      {"pathlib._local PurePosixPath", index::GlobalRole::function},
      {"collections OrderedDict", index::GlobalRole::mapping},
      {"torch Size", index::GlobalRole::function},
      {"torch uint8", index::GlobalRole::value},
      {"torch int8", index::GlobalRole::value},
      {"torch int16", index::GlobalRole::value},
      {"torch short", index::GlobalRole::value},
      {"torch int32", index::GlobalRole::value},
      {"torch int", index::GlobalRole::value},
      {"torch int64", index::GlobalRole::value},
      {"torch long", index::GlobalRole::value},
      {"torch float16", index::GlobalRole::value},
      {"torch half", index::GlobalRole::value},
      {"torch float32", index::GlobalRole::value},
      {"torch float", index::GlobalRole::value},
      {"torch float64", index::GlobalRole::value},
      {"torch double", index::GlobalRole::value},
      {"torch complex32", index::GlobalRole::value},
      {"torch chalf", index::GlobalRole::value},
      {"torch complex64", index::GlobalRole::value},
      {"torch cfloat", index::GlobalRole::value},
      {"torch complex128", index::GlobalRole::value},
      {"torch cdouble", index::GlobalRole::value},
      {"torch bool", index::GlobalRole::value},
      {"torch qint8", index::GlobalRole::value},
      {"torch quint8", index::GlobalRole::value},
      {"torch qint32", index::GlobalRole::value},
      {"torch bfloat16", index::GlobalRole::value},
      {"torch quint4x2", index::GlobalRole::value},
      {"torch quint2x4", index::GlobalRole::value},
      {"torch bits1x8", index::GlobalRole::value},
      {"torch bits2x4", index::GlobalRole::value},
      {"torch bits4x2", index::GlobalRole::value},
      {"torch bits8", index::GlobalRole::value},
      {"torch bits16", index::GlobalRole::value},
      {"torch float8_e5m2", index::GlobalRole::value},
      {"torch float8_e4m3fn", index::GlobalRole::value},
      {"torch float8_e5m2fnuz", index::GlobalRole::value},
      {"torch float8_e4m3fnuz", index::GlobalRole::value},
      {"torch uint16", index::GlobalRole::value},
      {"torch uint32", index::GlobalRole::value},
      {"torch uint64", index::GlobalRole::value},
      {"torch uint1", index::GlobalRole::value},
      {"torch bit", index::GlobalRole::value},
      {"torch uint2", index::GlobalRole::value},
      {"torch uint3", index::GlobalRole::value},
      {"torch uint4", index::GlobalRole::value},
      {"torch uint5", index::GlobalRole::value},
      {"torch uint6", index::GlobalRole::value},
      {"torch uint7", index::GlobalRole::value},
      {"torch int1", index::GlobalRole::value},
      {"torch int2", index::GlobalRole::value},
      {"torch int3", index::GlobalRole::value},
      {"torch int4", index::GlobalRole::value},
      {"torch int5", index::GlobalRole::value},
      {"torch int6", index::GlobalRole::value},
      {"torch int7", index::GlobalRole::value},
      {"torch float8_e8m0fnu", index::GlobalRole::value},
      {"torch float4_e2m1fn_x2", index::GlobalRole::value},
      {"torch bcomplex32", index::GlobalRole::value},
      {"torch.serialization _get_layout", index::GlobalRole::function},
      {"torch.distributed.checkpoint.metadata BytesStorageMetadata", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.metadata ChunkStorageMetadata", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.metadata Metadata", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.metadata StorageMeta", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.metadata TensorStorageMetadata",
       index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.metadata MetadataIndex", index::GlobalRole::key_class},
      {"torch.distributed.checkpoint.metadata TensorProperties", index::GlobalRole::tuple_class},
      {"torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
       index::GlobalRole::enumeration},
      {"torch.distributed.checkpoint.filesystem _StorageInfo", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.filesystem _StoragePrefix", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.planner BytesIOWriteData", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.planner SavePlan", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.planner TensorWriteData", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.planner WriteItem", index::GlobalRole::dict_class},
      {"torch.distributed.checkpoint.planner WriteItemType", index::GlobalRole::enumeration},
      {"torch.distributed._shard.metadata ShardMetadata", index::GlobalRole::slots_class},
      {"torch.distributed._shard.sharded_tensor.metadata ShardedTensorMetadata",
       index::GlobalRole::dict_class},
      {"torch.distributed._shard.sharded_tensor.metadata TensorProperties",
       index::GlobalRole::tuple_class},
      {"torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING",
       index::GlobalRole::enumeration},
  };
  return kGlobals;
}

}  // namespace torch_ckpt::test
